"""What needs a GPU; skipped without one. With several, over NCCL: torchrun --nproc-per-node N -m pytest tests/gpu."""

import os

import pytest
import torch
from torch.nn import functional as F

import lss
from lss.mesh import detect_world
from tests.models import assert_same, tiny_gpt, tokens_and_labels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTH = 13


@pytest.mark.parametrize("gather", ["x", "kv", "separate"])
def test_equals_the_plain_model_on_the_cpu(gather):
    reference = tiny_gpt(LENGTH)
    tokens, labels = tokens_and_labels(2, LENGTH)
    expected = F.cross_entropy(reference(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
    expected.backward()
    mesh = lss.init_mesh(detect_world(os.environ).size)
    model = lss.parallelize(tiny_gpt(LENGTH).cuda(), mesh, gather=gather)
    batch = lss.shard({"tokens": tokens.cuda(), "labels": labels.cuda()}, mesh, shift_labels=0)
    logits = model(batch["tokens"], segment=batch["segment"])
    loss = lss.token_mean_cross_entropy(logits, batch["labels"], lss.count_tokens(model, batch["labels"]))
    loss.backward()
    lss.average_gradients(model)
    assert lss.context_of(model).sum_over_ranks(loss.detach()).item() == pytest.approx(expected.item(), rel=1e-10)
    expected_gradients = {name: weight.grad for name, weight in reference.named_parameters()}
    for name, weight in model.named_parameters():
        if name != "positions.weight":
            assert_same(weight.grad.cpu(), expected_gradients[name], name)


def test_dropout_masks_are_drawn_on_the_gpu():
    mesh = lss.init_mesh(detect_world(os.environ).size)
    model = lss.parallelize(tiny_gpt(LENGTH, dropout=0.3).cuda(), mesh)
    batch = lss.shard({"tokens": tokens_and_labels(2, LENGTH)[0].cuda()}, mesh, step=0)
    first, second = (model(batch["tokens"], segment=batch["segment"]) for _ in range(2))
    assert torch.equal(first, second)
