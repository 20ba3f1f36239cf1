"""Spans, shifts and plans against masks written out."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lss import documents as spans
from lss.attention import plan
from lss.errors import LayoutError
from lss.layout import Layout


@st.composite
def packed(draw):
    length = draw(st.integers(1, 20))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=6)) | {0})
        pieces = list(pairwise(cuts))
        rows.append(tuple(piece for piece in pieces if draw(st.booleans())))
    return length, tuple(rows)


@given(packed(), st.integers(1, 5), st.booleans(), st.sampled_from([None, 1, 3]))
def test_the_plan_is_the_mask(case, num_ranks, is_causal, max_queries):
    length, documents = case
    layout = Layout(length, num_ranks)
    seen = torch.zeros(len(documents), layout.padded_length, layout.padded_length, dtype=torch.int64)
    for rank in range(num_ranks):
        for tile in plan(layout, rank, documents, is_causal, max_queries):
            assert max_queries is None or tile.stop - tile.start <= max_queries
            for block in tile.blocks:
                size = (tile.stop - tile.start, block.stop - block.start)
                ones = torch.ones(size, dtype=torch.int64)
                part = ones.tril() if block.is_causal else ones
                first = layout.start(rank)
                seen[tile.rows, first + tile.start : first + tile.stop, block.start : block.stop] += part
    wanted = torch.zeros_like(seen)
    for row, pieces in enumerate(documents):
        for start, stop in pieces:
            wanted[row, start:stop, start:stop] = 1
    assert torch.equal(seen, wanted.tril() if is_causal else wanted)


def test_eight_tokens_as_two_segments_have_seven_labels():
    labels = torch.arange(1, 9)[None]
    shifted = spans.shift(labels, 1, spans.whole(1, 8), -100)
    assert shifted.tolist() == [[2, 3, 4, 5, 6, 7, 8, -100]]


def test_labels_stay_in_their_document():
    labels = torch.arange(1, 9)[None]
    documents = spans.from_lengths([[3, 1, 2]], 1, 8)
    assert spans.shift(labels, 1, documents, -100).tolist() == [[2, 3, -100, -100, 6, -100, -100, -100]]
    assert spans.shift(labels, 2, documents, -100).tolist() == [[3, -100, -100, -100, -100, -100, -100, -100]]
    assert spans.shift(labels, 0, documents, -100).tolist() == [[1, 2, 3, 4, 5, 6, -100, -100]]
    assert spans.positions_within(documents, 8).tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]


def test_padding_left_and_right():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1]])
    assert spans.from_padding(mask) == (((0, 2),), ((1, 3),), (), ((0, 3),))


def test_restarts_begin_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    documents = spans.split_at_restarts(positions, spans.whole(2, 5))
    assert documents == (((0, 3), (3, 5)), ((0, 1), (1, 5)))


@pytest.mark.parametrize(
    "action",
    [
        lambda: spans.from_padding(torch.tensor([[1, 0, 1]])),
        lambda: spans.split_at_restarts(torch.tensor([[0, 1, 5]]), spans.whole(1, 3)),
        lambda: spans.from_lengths([[2, 2]], 1, 3),
        lambda: spans.from_lengths([[0, 2]], 1, 3),
        lambda: spans.from_lengths([[3]], 2, 3),
    ],
)
def test_what_cannot_be_is_refused(action):
    with pytest.raises(LayoutError, match="allowed"):
        action()
