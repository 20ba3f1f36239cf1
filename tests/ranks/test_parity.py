"""Every loss, gradient and parameter over ranks equals those of the plain model on one device, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lss
from lss.state import full_gradients
from lss.testing import RankPool
from tests.models import assert_same, tiny_gpt, tokens_and_labels

STEPS = 5
RATE = 0.1


def serial_run(length: int, num_sequences: int, changes: dict) -> tuple[list[float], dict, dict]:
    """Losses, first gradients and final parameters of the plain model under torch's own loss and SGD."""
    model = tiny_gpt(length, **changes)
    tokens, labels = tokens_and_labels(num_sequences, length)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, first = [], {}
    for step in range(STEPS):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, first, dict(model.state_dict())


def distributed_run(
    sequence: int, data: int, gather: str, length: int, num_sequences: int, changes: dict
) -> tuple[list[float], dict, dict, dict]:
    """The same over ranks: losses, whole gradients, whole parameters, and this rank's own parameters."""
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model = lss.parallelize(tiny_gpt(length, **changes), mesh, gather=gather)
    context = lss.context_of(model)
    tokens, labels = tokens_and_labels(num_sequences, length)
    mine = slice(context.data.rank * num_sequences // data, (context.data.rank + 1) * num_sequences // data)
    batch = lss.shard({"tokens": tokens[mine], "labels": labels[mine]}, mesh, shift_labels=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, first = [], {}
    for step in range(STEPS):
        logits = model(batch["tokens"], segment=batch["segment"])
        loss = lss.token_mean_cross_entropy(logits, batch["labels"], lss.count_tokens(model, batch["labels"]))
        optimizer.zero_grad()
        loss.backward()
        lss.average_gradients(model)
        if step == 0:
            first = whole_gradients(model)
        optimizer.step()
        losses.append(context.sum_over_ranks(loss.detach()).item())
    return losses, first, lss.full_state_dict(model), dict(model.state_dict())


def whole_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients under the names of the plain model."""
    return {name: gradient.clone() for name, gradient in full_gradients(model).items()}


def compare(pool: RankPool, sequence: int, data: int, gather: str, length: int, num_sequences: int, **changes) -> None:
    losses, gradients, parameters = serial_run(length, num_sequences, changes)
    results = pool.run(distributed_run, sequence * data, sequence, data, gather, length, num_sequences, changes)
    for other_losses, other_gradients, other_parameters, _ in results:
        assert_same(torch.tensor(other_losses), torch.tensor(losses), "losses")
        assert other_gradients.keys() == gradients.keys()
        for name, expected in gradients.items():
            if length == 1 and ("query" in name or "key" in name):
                assert expected.abs().max() < 1e-15  # one key: its weight is 1 whatever the scores
                assert other_gradients[name].abs().max() < 1e-15
                continue
            assert_same(other_gradients[name], expected, f"gradient of {name}")
        for name, expected in parameters.items():
            assert_same(other_parameters[name], expected, f"parameter {name} after {STEPS} steps")
    replicas_are_bit_identical([own for *_, own in results])


def replicas_are_bit_identical(states: list[dict[str, Tensor]]) -> None:
    for state in states[1:]:
        for name, weight in state.items():
            if name != "positions.weight":
                assert torch.equal(weight, states[0][name]), name


@pytest.mark.supports("GPT", "whole", "data groups")
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("length", [12, 7, 2, 1])
@pytest.mark.parametrize(
    ("sequence", "data", "gather"),
    [
        *((*degrees, gather) for degrees in [(2, 1), (3, 1), (4, 1), (2, 2)] for gather in ("x", "kv", "separate")),
        *((1, data, "x") for data in (1, 4)),  # nothing is gathered
    ],
)
def test_equals_the_plain_model(ranks, sequence, data, length, gather, positions):
    compare(ranks, sequence, data, gather, length, 4, positions=positions)


@pytest.mark.parametrize("gather", ["x", "kv", "separate"])
@pytest.mark.parametrize("key_value_heads", [1, 2])
def test_grouped_heads_fewer_than_ranks(ranks, gather, key_value_heads):
    compare(ranks, 3, 1, gather, 10, 2, positions="rotary", key_value_heads=key_value_heads)


def ordered_run(sequence: int, data: int) -> dict[str, Tensor]:
    mesh = lss.init_mesh(sequence, data, device="cpu")
    model = lss.parallelize(tiny_gpt(12), mesh, ordered=True)
    tokens, labels = tokens_and_labels(2, 12)
    rows = slice(lss.context_of(model).data.rank, None, data)
    batch = lss.shard({"tokens": tokens[rows], "labels": labels[rows]}, mesh, shift_labels=0)
    logits = model(batch["tokens"], segment=batch["segment"])
    lss.token_mean_cross_entropy(logits, batch["labels"], lss.count_tokens(model, batch["labels"])).backward()
    lss.average_gradients(model)
    return whole_gradients(model)


@pytest.mark.parametrize(("sequence", "data"), [(3, 1), (2, 2)])
def test_sums_in_the_order_of_ranks_are_equal_too(ranks, sequence, data):
    _, expected, _ = serial_run(12, 2, {})
    for gradients in ranks.run(ordered_run, sequence * data, sequence, data):
        for name, gradient in expected.items():
            assert_same(gradients[name], gradient, name)


def test_tied_weights_are_averaged_once(ranks):
    compare(ranks, 2, 2, "x", 9, 4, tie_weights=True)
