"""Cutting and joining sequences of any length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lss.errors import LayoutError
from lss.layout import Layout

MAKERS = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "balanced": lambda length, num_ranks: Layout.balanced(length, num_ranks, range(1, length + 1)),
}
every_layout = given(length=st.integers(1, 200), num_ranks=st.integers(1, 9), name=st.sampled_from(list(MAKERS)))


@every_layout
def test_every_token_has_one_slot(length, num_ranks, name):
    layout = MAKERS[name](length, num_ranks)
    whole = torch.arange(2 * length).reshape(2, length)
    segments = [layout.shard(whole, rank, dim=1, fill=-1) for rank in range(num_ranks)]
    assert {segment.shape for segment in segments} == {(2, layout.segment_length)}
    assert sum(layout.num_tokens(rank) for rank in range(num_ranks)) == length
    assert torch.equal(layout.unshard(torch.cat(segments, 1), dim=1), whole)
    assert (torch.cat(segments, 1) == -1).sum() == 2 * (layout.padded_length - length)
    assert layout.segment_length - min(layout.num_tokens(rank) for rank in range(num_ranks)) <= max(num_ranks, 16)


@every_layout
def test_positions_are_global(length, num_ranks, name):
    layout = MAKERS[name](length, num_ranks)
    whole = torch.arange(length)
    for rank in range(num_ranks):
        assert torch.equal(layout.positions(rank), layout.shard(whole, rank, dim=0, fill=0))
    assert torch.equal(layout.all_positions(), torch.cat([layout.positions(rank) for rank in range(num_ranks)]))
    for piece in layout.all_pieces():
        found = layout.all_positions()[piece.slot : piece.slot + len(piece)]
        assert torch.equal(found, torch.arange(piece.start, piece.stop))


def test_contiguous_and_zigzag_by_hand():
    assert Layout.contiguous(10, 3).spans == (((0, 4),), ((4, 8),), ((8, 10),))
    assert Layout.zigzag(12, 3).spans == (((0, 2), (10, 12)), ((2, 4), (8, 10)), ((4, 8),))
    assert Layout.contiguous(2, 3).spans == (((0, 1),), ((1, 2),), ())


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_zigzag_shares_out_causal_work(num_ranks):
    layout = Layout.zigzag(1000, num_ranks)
    work = [sum(position + 1 for span in spans for position in range(*span)) for spans in layout.spans]
    assert max(work) <= 1.01 * sum(work) / num_ranks


def test_balanced_shares_out_any_work():
    generator = torch.Generator().manual_seed(0)
    work = torch.rand(8192, generator=generator).pow(8).cumsum(0).remainder(50).tolist()
    layout = Layout.balanced(8192, 8, work)
    loads = [sum(sum(work[start:stop]) for start, stop in spans) for spans in layout.spans]
    assert max(loads) <= 1.05 * sum(loads) / 8


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(("length", "num_ranks"), [(0, 1), (3, 0)])
def test_refuses_nothing_to_cut(maker, length, num_ranks):
    with pytest.raises(LayoutError, match="at least 1"):
        maker(length, num_ranks)


def test_refuses_other_names():
    with pytest.raises(LayoutError, match="contiguous, zigzag, balanced"):
        Layout.named("striped", 6, 2)


def test_refuses_a_tensor_of_another_length():
    with pytest.raises(LayoutError, match="size 6"):
        Layout.contiguous(6, 2).shard(torch.zeros(2, 5), 0, dim=1, fill=0)
