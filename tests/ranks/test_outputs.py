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


def refusals() -> list[str]:
    mesh = lss.init_mesh(1, device="cpu")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    attempts = [
        lambda: lss.shard({"tokens": tokens, "labels": tokens}, mesh),
        lambda: lss.shard({"tokens": tokens, "labels": tokens}, mesh, shift_labels=-1),
        lambda: lss.shard({"tokens": tokens, "attention_mask": tokens}, mesh, documents=[[4]]),
        lambda: lss.shard({"tokens": tokens, "attention_mask": torch.ones(1, 4, 4)}, mesh),
        lambda: lss.shard({"tokens": tokens, "position_ids": torch.tensor([[0, 1, 3, 4]])}, mesh),
        lambda: lss.shard({"tokens": tokens, "position_ids": torch.tensor([[0, 1, 0, 1]])}, mesh, documents=[[4]]),
        lambda: lss.shard({"tokens": tokens, "position_ids": torch.tensor([[-1, 0, 1, 2]])}, mesh),
        lambda: lss.shard({"tokens": tokens, "attention_mask": torch.tensor([[0, 0, -9, -9]])}, mesh),
        lambda: lss.shard({"tokens": tokens, "labels": tokens.double()}, mesh, shift_labels=1),
    ]
    found = []
    for attempt in attempts:
        with pytest.raises(LayoutError) as raised:
            attempt()
        found.append(str(raised.value))
    return found


def test_unclear_batches_are_refused(ranks):
    (messages,) = ranks.run(refusals, 1)
    expected = ["shift_labels=None", "shift_labels=-1", "one of them", "a padding mask [B, L]", "go from 1 to 3"]
    expected += [
        "start again inside a document",
        "position_ids of",
        "with values from -9 to 0",
        "shift_labels=1 with labels",
    ]
    for message, part in zip(messages, expected, strict=True):
        assert part in message
