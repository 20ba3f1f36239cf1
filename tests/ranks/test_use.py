"""What users do beside the main road: other lengths, frozen and unused weights, clipping, misuse."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lss
from lss.collectives import agree, agree_equal, from_first_rank
from lss.errors import DataError, LayoutError, MeshError
from tests.models import assert_same, tiny_gpt, tokens_and_labels
from tests.ranks.test_parity import whole_gradients

TABLE = 12


def backward(model: nn.Module, mesh: object, length: int) -> dict:
    tokens, labels = tokens_and_labels(2, length)
    batch = lss.shard({"tokens": tokens, "labels": labels}, mesh, shift_labels=0)
    logits = model(batch["tokens"], segment=batch["segment"])
    lss.token_mean_cross_entropy(logits, batch["labels"], lss.count_tokens(model, batch["labels"])).backward()
    lss.average_gradients(model)
    return batch


def gradients_at(length: int) -> dict:
    mesh = lss.init_mesh(3, device="cpu")
    model = lss.parallelize(tiny_gpt(TABLE), mesh)
    backward(model, mesh, length)
    return whole_gradients(model)


@pytest.mark.parametrize("length", [11, 7, 4, 2])
def test_sequences_shorter_than_the_table(ranks, length):
    model = tiny_gpt(TABLE)
    tokens, labels = tokens_and_labels(2, length)
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    for gradients in ranks.run(gradients_at, 3, length):
        for name, weight in model.named_parameters():
            assert_same(gradients[name], weight.grad, name)


def clipped(limit: float) -> tuple[float, dict]:
    mesh = lss.init_mesh(2, 2, device="cpu")
    model = lss.parallelize(tiny_gpt(TABLE), mesh)
    backward(model, mesh, TABLE)
    norm = lss.clip_gradient_norm(model, limit)
    return norm.item(), whole_gradients(model)


@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_clipping_is_torchs(ranks, limit):
    model = tiny_gpt(TABLE)
    tokens, labels = tokens_and_labels(2, TABLE)
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), limit)
    for norm, gradients in ranks.run(clipped, 4, limit):
        assert norm == pytest.approx(expected.item(), rel=1e-10)
        for name, weight in model.named_parameters():
            assert_same(gradients[name], weight.grad, name)


def frozen_and_unused() -> tuple[bool, bool, float]:
    mesh = lss.init_mesh(2, device="cpu")
    model = tiny_gpt(TABLE)
    model.spare = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.partly = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.norm.weight.requires_grad_(False)
    model = lss.parallelize(model, mesh)
    if lss.context_of(model).sequence.rank == 1:
        model.partly.grad = torch.full((3,), 2.0, dtype=torch.float64)
    backward(model, mesh, TABLE)
    return model.spare.grad is None, model.norm.weight.grad is None, model.partly.grad.sum().item()


def test_weights_that_no_rank_used_keep_no_gradient(ranks):
    assert ranks.run(frozen_and_unused, 2) == [(True, True, 6.0)] * 2


def seeded_differently() -> torch.Tensor:
    mesh = lss.init_mesh(2, 2, device="cpu")
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]  # neighbours hold one sequence together
    model = tiny_gpt(TABLE)
    model.register_buffer("scale", torch.full((1,), float(torch.distributed.get_rank()), dtype=torch.float64))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.distributed.get_rank())
    return torch.cat([weight.flatten() for weight in lss.full_state_dict(lss.parallelize(model, mesh)).values()])


def test_all_ranks_start_from_the_weights_of_the_first(ranks):
    weights = {**tiny_gpt(TABLE).state_dict(), "scale": torch.zeros(1, dtype=torch.float64)}
    with_scale = [weights.pop("scale"), *weights.values()]  # a model's own buffer comes first
    expected = torch.cat([weight.flatten() for weight in with_scale])
    for state in ranks.run(seeded_differently, 4):
        assert torch.equal(state, expected)


def disagreeing() -> list[str]:
    def fail_on_rank_1() -> None:
        if torch.distributed.get_rank() == 1:
            raise DataError("no data", allowed="data")

    lss.init_mesh(3, device="cpu")
    found = []
    for action in (fail_on_rank_1, lambda: agree_equal("the data", str(torch.distributed.get_rank() == 2), "look")):
        try:
            agree(action) if action is fail_on_rank_1 else action()
        except (DataError, MeshError) as error:
            found.append(f"{type(error).__name__} {error.on_all_ranks} {error}")
    found.append(from_first_rank(f"of {torch.distributed.get_rank()}"))
    return found


def test_all_ranks_fail_together(ranks):
    results = ranks.run(disagreeing, 3)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == "DataError True rank 1: no data\n  allowed: data"
    assert "rank 0: False; rank 2: True" in results[0][1]
    assert results[0][2] == "of 0"


def masks_of_calls() -> list[float]:
    """Two forwards for each backward, and an evaluation: every training call has a mask of its own."""
    model = lss.parallelize(tiny_gpt(TABLE, dropout=0.5), None)
    batch = lss.shard({"tokens": torch.ones(1, TABLE, dtype=torch.int64)}, None)
    found = []
    for step in range(3):
        outputs = [model(batch["tokens"], segment=batch["segment"]).sum() for _ in range(2)]
        sum(outputs).backward()
        if step == 1:
            model.eval()(batch["tokens"], segment=batch["segment"])
            model.train()
        found += [output.item() for output in outputs]
    return found


def test_no_mask_is_used_twice():
    found = masks_of_calls()
    assert len(set(found)) == 6


def two_batches() -> str:
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(tiny_gpt(TABLE), mesh)
    torch.manual_seed(torch.distributed.get_rank())
    batch = lss.shard({"tokens": torch.randint(17, (2, TABLE))}, mesh)
    with pytest.raises(LayoutError) as raised:
        model(batch["tokens"], segment=batch["segment"])
    return str(raised.value)


def test_ranks_of_a_group_must_cut_the_same_batch(ranks):
    assert all("given different batches" in message for message in ranks.run(two_batches, 2))


def recomputed_later(recompute: bool) -> dict:
    """Two micro-batches and an evaluation come between forward and backward."""
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(tiny_gpt(TABLE, dropout=0.3, attention_dropout=0.2), mesh)
    if recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    losses = []
    for length, seed in ((TABLE, 0), (7, 1)):
        tokens = torch.randint(17, (2, length), generator=torch.Generator().manual_seed(seed))
        batch = lss.shard({"tokens": tokens}, mesh)
        losses.append(model(batch["tokens"], segment=batch["segment"]).square().sum())
    with torch.no_grad():
        batch = lss.shard({"tokens": torch.zeros(1, 5, dtype=torch.int64)}, mesh)
        model(batch["tokens"], segment=batch["segment"])
    sum(losses).backward()
    lss.average_gradients(model)
    return whole_gradients(model)


def test_recomputation_belongs_to_its_own_call(ranks):
    (expected, _), (found, _) = (ranks.run(recomputed_later, 2, recompute) for recompute in (False, True))
    for name, gradient in expected.items():
        assert_same(found[name], gradient, name)


def optimizer_made_before() -> float:
    mesh = lss.init_mesh(2, device="cpu")
    model = tiny_gpt(TABLE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = lss.parallelize(model, mesh)
    before = lss.full_state_dict(model)["positions.weight"].clone()
    backward(model, mesh, TABLE)
    optimizer.step()
    return (lss.full_state_dict(model)["positions.weight"] - before).abs().min().item()


def test_an_optimizer_that_was_made_before_trains_the_positions(ranks):
    assert min(ranks.run(optimizer_made_before, 2)) > 0


def bf16_autocast(sequence: int) -> list[float]:
    mesh = lss.init_mesh(sequence, device="cpu")
    model = lss.parallelize(tiny_gpt(TABLE, torch.float32), mesh)
    tokens, labels = tokens_and_labels(2, TABLE)
    batch = lss.shard({"tokens": tokens, "labels": labels}, mesh, shift_labels=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch["tokens"], segment=batch["segment"])
        loss = lss.token_mean_cross_entropy(logits, batch["labels"], lss.count_tokens(model, batch["labels"]))
        loss.backward()
        lss.average_gradients(model)
        optimizer.step()
        losses.append(lss.context_of(model).sum_over_ranks(loss.detach()).item())
    return losses


def test_bf16_follows_one_rank(ranks):
    (expected,) = ranks.run(bf16_autocast, 1, 1)
    for losses in ranks.run(bf16_autocast, 3, 3):
        assert losses == pytest.approx(expected, rel=1e-2)
