"""Plans cover a mask exactly, share out its work, and waste little."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lss.attention.kernels.flash_cpu import FLASH_CPU
from lss.attention.plan import Block, Limits, plan
from lss.documents import from_lengths
from lss.layout import Layout
from lss.masks import Causal, Dense, Documents, Full, Function, Mask, Padding, Prefix, View, Window
from tests.dense import MASKS, ROWS

LIMITS = [
    Limits(),
    Limits(None, None, None),
    Limits(4, 6, 5, 1),
    Limits(None, None, 8, 2, joined=False),
    Limits(3, 3, 2, 1),
]


def pairs_of(block: Block, mask: Mask) -> torch.Tensor:
    """Pairs that a block computes, [S, T]."""
    size = (len(block.queries), len(block.keys))
    if block.view is View.PARTIAL:
        spans = (torch.arange(piece.start, piece.stop) for piece in (block.queries, block.keys))
        return mask.pairs(block.rows.start or 0, *spans).expand(size).int()
    return torch.ones(size, dtype=torch.int32).tril() if block.view is View.CAUSAL else torch.ones(size).int()


@given(
    name=st.sampled_from(list(MASKS)),
    length=st.integers(1, 40),
    num_ranks=st.integers(1, 4),
    cut_by=st.sampled_from(["contiguous", "zigzag", "balanced"]),
    limits=st.sampled_from(LIMITS),
    num_chunks=st.integers(1, 3),
)
def test_every_pair_is_computed_once(name, length, num_ranks, cut_by, limits, num_chunks):
    make, sees = MASKS[name]
    mask = make(length)
    if cut_by == "balanced":
        layout = Layout.balanced(length, num_ranks, range(1, length + 1))
    else:
        layout = Layout.named(cut_by, length, num_ranks)
    size = layout.segment_length
    seen = torch.zeros(ROWS, layout.padded_length, layout.padded_length, dtype=torch.int32)
    for rank in range(num_ranks):
        found = plan(mask, ROWS, layout, layout, rank, limits, num_chunks)
        own = [(block, rank * size + block.keys.slot) for block in found.own]
        for chunk in found.chunks:
            width = chunk.stop - chunk.start
            for run in chunk.runs:
                for block in run.blocks:
                    for slot in range(len(block.keys)):
                        other, within = divmod(run.start + block.keys.slot + slot, width)
                        where = slice(block.queries.slot, block.queries.slot + len(block.queries))
                        rows = seen[block.rows, rank * size : (rank + 1) * size]
                        rows[:, where, other * size + chunk.start + within] += pairs_of(block, mask)[:, slot]
        for block, first in own:
            where = slice(rank * size + block.queries.slot, rank * size + block.queries.slot + len(block.queries))
            seen[block.rows, where, first : first + len(block.keys)] += pairs_of(block, mask)
    in_order = layout.unshard(layout.unshard(seen, dim=1), dim=2)
    index = torch.arange(length)
    wanted = [sees(index[:, None], index[None], row, length).int().expand(1, length, length) for row in range(ROWS)]
    assert torch.equal(in_order, torch.cat(wanted))


def drawn(length: int, seed: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Documents whose lengths have a density of 1 / x, up to the whole."""
    generator, lengths = random.Random(seed), []
    while sum(lengths) < length:
        size = int(2 ** generator.uniform(0, length.bit_length() - 1))
        lengths.append(min(size, length - sum(lengths)))
    return from_lengths([lengths], 1, length)


def areas(mask: Mask, layout: Layout) -> list[int]:
    limits = FLASH_CPU.limits
    ranks = range(layout.num_ranks)
    return [sum(block.area for block in plan(mask, 1, layout, layout, rank, limits).blocks) for rank in ranks]


def true_area(mask: Mask, length: int) -> int:
    index = torch.arange(length)
    return sum(int(mask.pairs(0, part, index).sum()) for part in index.split(512))


WORK = {
    "causal": Causal(),
    "window 1024": Causal() & Window(1023),
    "window both sides": Window(700, 700),
    "documents": Documents(from_lengths([[4096, 2048, 1024, 1024]], 1, 8192)),
    "documents, causal": Causal() & Documents(from_lengths([[4096, 2048, 1024, 1024]], 1, 8192)),
    "documents, drawn": Causal() & Documents(drawn(8192, 0)),
}


@pytest.mark.parametrize("mask", WORK.values(), ids=WORK)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_what_is_computed_is_the_mask_and_little_more(mask, num_ranks):
    computed = sum(areas(mask, Layout.zigzag(8192, num_ranks)))
    assert computed <= 1.1 * true_area(mask, 8192)


def test_zigzag_is_balanced_under_a_causal_mask():
    found = areas(Causal(), Layout.zigzag(8192, 8))
    assert max(found) <= 1.05 * sum(found) / 8


@pytest.mark.parametrize("seed", range(5))
def test_balanced_is_balanced_within_documents(seed):
    documents = drawn(8192, seed)
    work = [position + 1 for start, stop in documents[0] for position in range(stop - start)]
    found = areas(Causal() & Documents(documents), Layout.balanced(8192, 8, work))
    assert max(found) <= 1.05 * sum(found) / 8


def test_empty_and_full_blocks_need_no_mask():
    layout = Layout.contiguous(4096, 4)
    found = plan(Causal(), 1, layout, layout, 3, Limits(edge=None))
    assert [block.view for block in found.own] == [View.CAUSAL]
    assert [(block.view, len(block.keys)) for run in found.chunks[0].runs for block in run.blocks] == [
        (View.FULL, 3072)
    ]
    assert plan(Causal(), 1, layout, layout, 0, Limits(edge=None)).chunks[0].runs == ()


def test_masks_combine_without_tensors():
    window = Causal() & Window(15)
    assert window.view(0, (100, 110), (50, 60)) is View.EMPTY
    assert window.view(0, (100, 104), (92, 96)) is View.FULL
    assert window.view(0, (100, 110), (100, 110)) is View.CAUSAL
    assert (Causal() | Prefix(8)).view(0, (0, 4), (0, 8)) is View.FULL
    assert (Full() & Padding((((0, 5),),))).view(0, (0, 9), (5, 9)) is View.EMPTY
    assert Function(lambda q, k: q == k).view(0, (0, 2), (2, 4)) is View.EMPTY
    assert Dense(torch.ones(4, 4).bool()).view(0, (0, 4), (0, 4)) is View.FULL


def test_a_scattered_mask_keeps_large_blocks():
    layout = Layout.contiguous(1024, 1)
    scattered = Dense(torch.rand(1024, 1024, generator=torch.Generator().manual_seed(0)) > 0.5)
    assert len(plan(scattered, 1, layout, layout, 0, FLASH_CPU.limits).blocks) == 4


def test_blocks_end_where_documents_do():
    documents = Documents(drawn(8192, 0))
    found = plan(documents, 1, Layout.contiguous(8192, 1), Layout.contiguous(8192, 1), 0, FLASH_CPU.limits)
    assert len(found.blocks) <= 2 * len(documents.queries[0])
