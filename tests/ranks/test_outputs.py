"""Predictions come back whole, in order and not repeated."""

import pytest
import torch
from torch import Tensor

import lss
from lss.errors import LayoutError
from tests.models import assert_same, tiny_gpt, tokens_and_labels


def predictions(sequence: int, data: int, length: int) -> Tensor:
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model = lss.parallelize(tiny_gpt(length), mesh).eval()
    tokens, _ = tokens_and_labels(4, length)
    rank = lss.context_of(model).data.rank
    batch = lss.shard({"tokens": tokens[rank * 4 // data : (rank + 1) * 4 // data]}, mesh)
    with torch.no_grad():
        logits = model(batch["tokens"], segment=batch["segment"])
    return lss.unshard(logits, batch["segment"], mesh, data_groups=True)


@pytest.mark.supports("GPT", "whole")
@pytest.mark.parametrize("length", [12, 7, 2, 1])
@pytest.mark.parametrize(("sequence", "data"), [(1, 1), (3, 1), (2, 2), (1, 4)])
def test_predictions_are_those_of_the_plain_model(ranks, sequence, data, length):
    tokens, _ = tokens_and_labels(4, length)
    expected = tiny_gpt(length)(tokens)
    for whole in ranks.run(predictions, sequence * data, sequence, data, length):
        assert_same(whole, expected, "logits", 1e-12)


def unequal_groups() -> str:
    mesh = lss.init_mesh(1, 2, device="cpu")
    length = 6 - lss.context_of(lss.parallelize(tiny_gpt(6), mesh)).data.rank
    batch = lss.shard({"tokens": torch.zeros(1, length, dtype=torch.int64)}, mesh)
    with pytest.raises(LayoutError) as raised:
        lss.unshard(torch.zeros(1, length, 2), batch["segment"], mesh, data_groups=True)
    return str(raised.value)


def test_groups_of_other_shapes_are_not_joined(ranks):
    assert all("[[1, 6, 2], [1, 5, 2]]" in message for message in ranks.run(unequal_groups, 2))
