"""Cutting and joining sequences of any length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lss.errors import LayoutError
from lss.layout import Layout


@given(length=st.integers(1, 60), num_ranks=st.integers(1, 9))
def test_every_token_has_one_slot(length, num_ranks):
    layout = Layout(length, num_ranks)
    whole = torch.arange(2 * length).reshape(2, length)
    segments = [layout.shard(whole, rank, dim=1, fill=-1) for rank in range(num_ranks)]
    assert {segment.shape for segment in segments} == {(2, layout.segment_length)}
    assert sum(layout.num_tokens(rank) for rank in range(num_ranks)) == length
    assert torch.equal(layout.unshard(torch.cat(segments, 1), dim=1), whole)
    assert (torch.cat(segments, 1)[:, length:] == -1).all()


@given(length=st.integers(1, 60), num_ranks=st.integers(1, 9))
def test_positions_are_global_and_legal(length, num_ranks):
    layout = Layout(length, num_ranks)
    positions = torch.cat([layout.positions(rank) for rank in range(num_ranks)])
    assert torch.equal(positions, layout.all_positions())
    assert torch.equal(positions[:length], torch.arange(length))
    assert (positions[length:] == length - 1).all()


@pytest.mark.parametrize(("length", "num_ranks"), [(0, 1), (-1, 2), (3, 0)])
def test_refuses_nothing_to_cut(length, num_ranks):
    with pytest.raises(LayoutError, match="at least 1"):
        Layout(length, num_ranks)


def test_refuses_a_tensor_of_another_length():
    with pytest.raises(LayoutError, match="size 6"):
        Layout(6, 2).shard(torch.zeros(2, 5), 0, dim=1, fill=0)
