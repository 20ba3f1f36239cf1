"""One mask for each position of each sequence, whatever the ranks."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lss
from lss.dropout import PositionDropout, Site
from tests.models import assert_same, tiny_gpt, tokens_and_labels
from tests.ranks.test_parity import whole_gradients

LENGTH, NUM_SEQUENCES, STEPS = 37, 4, 20


def train_with_dropout(sequence: int, data: int, accumulation: int, recompute: bool) -> tuple[list[float], dict]:
    """Losses and last gradients of some steps."""
    mesh = lss.init_mesh(sequence, data, device="cpu")
    plain = tiny_gpt(LENGTH, dropout=0.1, attention_dropout=0.1)
    model = lss.parallelize(plain, mesh, seed=5)
    if recompute:
        for block in model.blocks:
            block.forward = _recomputed(block)
    context = lss.context_of(model)
    tokens, labels = tokens_and_labels(NUM_SEQUENCES, LENGTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = NUM_SEQUENCES // data // accumulation
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        firsts = [(context.data.rank * accumulation + part) * size for part in range(accumulation)]
        micro_batches = [
            lss.shard(
                {"tokens": tokens[first : first + size], "labels": labels[first : first + size]},
                mesh,
                shift_labels=0,
                first_sample=first,
                step=step,
            )
            for first in firsts
        ]
        count = lss.count_tokens(model, *(batch["labels"] for batch in micro_batches))
        total = torch.zeros((), dtype=torch.float64)
        for batch in micro_batches:
            logits = model(batch["tokens"], segment=batch["segment"])
            loss = lss.token_mean_cross_entropy(logits, batch["labels"], count)
            loss.backward()
            total += loss.detach()
        lss.average_gradients(model)
        optimizer.step()
        losses.append(context.sum_over_ranks(total).item())
    return losses, whole_gradients(model)


def _recomputed(block: nn.Module):
    original = block.forward
    return lambda x, positions: checkpoint(original, x, positions, use_reentrant=False)


@pytest.mark.supports("GPT", "dropout", "activation checkpointing")
@pytest.mark.parametrize(
    ("sequence", "data", "accumulation", "recompute"),
    [
        (2, 1, 1, False),
        (3, 1, 1, False),
        (4, 1, 1, False),
        (2, 2, 1, False),
        (1, 4, 1, False),
        (2, 1, 2, False),
        (2, 1, 1, True),
    ],
)
def test_same_at_every_degree(ranks, sequence, data, accumulation, recompute):
    ((losses, gradients),) = ranks.run(train_with_dropout, 1, 1, 1, 1, False)
    for other, other_gradients in ranks.run(
        train_with_dropout, sequence * data, sequence, data, accumulation, recompute
    ):
        assert_same(torch.tensor(other), torch.tensor(losses), "losses")
        for name, gradient in gradients.items():
            assert_same(other_gradients[name], gradient, name)


def masks(rate: float, steps: list[int], sites: list[int], seed: int) -> list[torch.Tensor]:
    mesh = lss.init_mesh(1, device="cpu")
    context = lss.context_of(lss.parallelize(tiny_gpt(8), mesh, seed=seed))
    ones = torch.ones(4, 300, 50, dtype=torch.float64)
    found = []
    for step in steps:
        context.begin(lss.shard({"tokens": torch.zeros(4, 300)}, mesh, step=step)["segment"], 4, training=True)
        found.extend(PositionDropout(Site("here", rate, site, context))(ones) for site in sites)
    return found


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.97])
def test_rate_and_mean(ranks, rate):
    for mask in ranks.run(masks, 1, rate, [0], [0, 1], 0)[0]:
        dropped = (mask == 0).double()
        spread = (rate * (1 - rate) / mask.numel()) ** 0.5
        assert abs(dropped.mean() - rate) < 5 * spread
        assert mask.max().item() == pytest.approx(1 / (1 - rate), rel=1e-3)
        # no row, column or sequence stands out
        for dims in ((0, 1), (0, 2), (1, 2)):
            share = dropped.mean(dims)
            assert (share - rate).abs().max() < 6 * spread * share.numel() ** 0.5


def test_masks_are_independent(ranks):
    different = ranks.run(masks, 1, 0.5, [0, 1], [0, 1], 0)[0] + ranks.run(masks, 1, 0.5, [0], [0], 1)[0]
    flat = torch.stack([mask.flatten() for mask in different]) - 1
    correlation = (flat @ flat.T / flat.size(1)).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / flat.size(1) ** 0.5
    blocks = flat[0].view(4, 300, 50)[:, :256].reshape(16, -1)
    correlation = (blocks @ blocks.T / blocks.size(1)).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / blocks.size(1) ** 0.5
