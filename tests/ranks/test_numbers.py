"""Precision and repeatability."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lss
from lss.gradients import replicas_that_differ
from tests.models import tiny_gpt, tokens_and_labels
from tests.ranks.test_parity import whole_gradients

LENGTH, WIDTH = 64, 64


def model():
    return tiny_gpt(LENGTH, torch.float32, width=WIDTH, layers=2, heads=4)


def bf16_run(sequence: int, gather: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Whole outputs and gradients under autocast to bfloat16."""
    mesh = lss.init_mesh(sequence, device="cpu")
    parallel = lss.parallelize(model(), mesh, gather=gather)
    tokens, labels = tokens_and_labels(2, LENGTH)
    batch = lss.shard({"tokens": tokens, "labels": labels}, mesh, shift_labels=0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = parallel(batch["tokens"], segment=batch["segment"])
    count = lss.count_tokens(parallel, batch["labels"])
    lss.token_mean_cross_entropy(logits, batch["labels"], count).backward()
    lss.average_gradients(parallel)
    return lss.unshard(logits, batch["segment"], mesh), whole_gradients(parallel)


def relative(found: list[Tensor], exact: list[Tensor]) -> float:
    """Error of all together, by the L2 norm."""
    difference = sum((a.double() - b).square().sum() for a, b in zip(found, exact, strict=True))
    return (difference / sum(b.square().sum() for b in exact)).sqrt().item()


@pytest.mark.parametrize("gather", ["x", "kv", "separate"])
def test_bf16_error_does_not_grow_with_ranks(ranks8, gather):
    exact = model().double()
    tokens, labels = tokens_and_labels(2, LENGTH)
    logits = exact(tokens)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    names = [name for name, _ in exact.named_parameters()]
    errors = {}
    for sequence in (1, 2, 4, 8):
        outputs, gradients = ranks8.run(bf16_run, sequence, sequence, gather)[0]
        of_gradients = relative([gradients[name] for name in names], [w.grad for w in exact.parameters()])
        errors[sequence] = (relative([outputs], [logits]), of_gradients)
    print(gather, errors)
    assert min(errors[1]) > 1e-4
    for at_8, at_1 in zip(errors[8], errors[1], strict=True):
        assert at_8 <= 1.1 * at_1


def drifted() -> list[list[str]]:
    mesh = lss.init_mesh(2, 2, device="cpu")
    parallel = lss.parallelize(model(), mesh)
    found = [replicas_that_differ(parallel)]
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        if rank == 3:
            parallel.norm.bias.view(torch.int32)[0] += 1
        if rank == 0:
            parallel.positions.weight[0, 0] += 1
    return [*found, replicas_that_differ(parallel)]


def test_a_replica_that_differs_in_one_bit_is_named(ranks):
    for results in ranks.run(drifted, 4):
        assert results == [[], ["positions.weight", "norm.bias"]]
