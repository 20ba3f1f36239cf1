"""Spans and shifts, written out."""

import pytest
import torch

from lss import documents as spans
from lss.errors import LayoutError


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
