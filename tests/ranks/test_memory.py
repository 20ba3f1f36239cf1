"""Activations of a rank, by torch's memory tracker: a share of the serial run's, and the gathered tensors."""

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

import lss
from lss.models import GPT, GPTConfig

LENGTH, NUM_SEQUENCES, WIDTH, LAYERS, NUM_RANKS = 512, 2, 128, 4, 4
GATHERED = LENGTH * NUM_SEQUENCES * WIDTH * 4 * LAYERS  # bytes of one tensor [L, B, E] in each layer


SHAPE = GPTConfig(WIDTH, LAYERS, 4, max_length=LENGTH)


def activations(
    sequence: int,
    gather: str,
    keep: bool = True,
    chunks: int = 1,
    shape: GPTConfig = SHAPE,
    num_sequences: int = NUM_SEQUENCES,
) -> tuple[int, int]:
    """Bytes at the end of forward, and at the peak of the step, without parameters and gradients."""
    torch.manual_seed(0)
    model = GPT(shape)
    tokens = torch.zeros(num_sequences, shape.max_length, dtype=torch.int64)
    batch = {"tokens": tokens, "labels": tokens}
    if gather == "serial":
        return _tracked(model, lambda: model(batch["tokens"]), batch["labels"])
    mesh = lss.init_mesh(sequence, device="cpu")
    model = lss.parallelize(model, mesh, gather=gather, keep=keep, chunks=chunks)
    part = lss.shard(batch, mesh, shift_labels=0)
    return _tracked(model, lambda: model(part["tokens"], segment=part["segment"]), part["labels"])


def _tracked(model: nn.Module, forward, labels: torch.Tensor) -> tuple[int, int]:
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        logits = forward()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        now = _activation_bytes(tracker.get_tracker_snapshot("current"))
        loss.backward()
    return now, _activation_bytes(tracker.get_tracker_snapshot("peak"))


def _activation_bytes(snapshot: dict) -> int:
    (kinds,) = snapshot.values()
    named = {str(kind).rpartition(".")[2]: size for kind, size in kinds.items()}
    return named["Total"] - named["PARAM"] - named["GRAD"]


@pytest.fixture(scope="module")
def serial(ranks):
    return ranks.run(activations, 1, 1, "serial")[0]


@pytest.mark.parametrize(
    ("gather", "gathered"), [("x", 3 * GATHERED), ("kv", 2 * GATHERED), ("separate", 2 * GATHERED)]
)
def test_activations_are_divided(ranks, serial, gather, gathered):
    for rank in ranks.run(activations, NUM_RANKS, NUM_RANKS, gather):
        for mine, whole in zip(rank, serial, strict=True):
            assert gathered < whole  # so that the bound means something
            assert mine <= whole / NUM_RANKS + gathered


ONE_LAYER = LENGTH * NUM_SEQUENCES * 2 * WIDTH * 4  # bytes of the gathered keys and values of one layer


@pytest.mark.parametrize("gather", ["kv", "separate"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_gathering_again_leaves_one_layer(ranks, serial, gather, chunks):
    for now, peak in ranks.run(activations, NUM_RANKS, NUM_RANKS, gather, False, chunks):
        assert now <= 1.15 * serial[0] / NUM_RANKS
        assert peak <= 1.15 * serial[1] / NUM_RANKS + ONE_LAYER / chunks * (2 if chunks > 1 else 1)


def optimizer_bytes(sequence: int) -> tuple[int, int, int]:
    """Bytes of the positional table on this rank: weight, gradient, and AdamW's two moments."""
    mesh = lss.init_mesh(sequence, device="cpu")
    model = lss.parallelize(GPT(GPTConfig(WIDTH, 1, 4, max_length=LENGTH)), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    part = lss.shard({"tokens": torch.zeros(1, LENGTH, dtype=torch.int64)}, mesh)
    model(part["tokens"], segment=part["segment"]).sum().backward()
    optimizer.step()
    table = model.positions.weight
    moments = sum(moment.nbytes for name, moment in optimizer.state[table].items() if name != "step")
    return table.nbytes, table.grad.nbytes, moments


def test_positional_rows_exist_once(ranks):
    whole = LENGTH * WIDTH * 4
    assert ranks.run(optimizer_bytes, 4, 4) == [(whole // 4, whole // 4, whole // 2)] * 4
