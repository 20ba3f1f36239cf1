"""Over ranks, the plain GPT with GPT-2's weights has the loss and gradients of transformers' serial GPT-2."""

import pytest
from torch import Tensor
from torch.nn import functional as F

import lss
from tests.gpt2 import gpt_of, random_gpt2, renamed
from tests.models import assert_same, tokens_and_labels
from tests.ranks.test_parity import whole_gradients

LENGTH = 13


def loss_and_gradients(state: dict[str, Tensor], gather: str) -> tuple[float, dict[str, Tensor]]:
    mesh = lss.init_mesh(3, device="cpu")
    model = lss.parallelize(gpt_of(state), mesh, gather=gather)
    tokens, labels = tokens_and_labels(2, LENGTH)
    batch = lss.shard({"tokens": tokens, "labels": labels}, mesh, shift_labels=0)
    logits = model(batch["tokens"], segment=batch["segment"])
    loss = lss.token_mean_cross_entropy(logits, batch["labels"], lss.count_tokens(model, batch["labels"]))
    loss.backward()
    lss.average_gradients(model)
    return lss.context_of(model).sum_over_ranks(loss.detach()).item(), whole_gradients(model)


@pytest.mark.parametrize("gather", ["x", "kv", "separate"])
def test_equals_transformers_gpt2(ranks, gather):
    reference = random_gpt2(LENGTH)
    tokens, labels = tokens_and_labels(2, LENGTH)
    expected = F.cross_entropy(reference(tokens).logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    expected.backward()
    expected_gradients = renamed({name: weight.grad for name, weight in reference.named_parameters()})
    for loss, gradients in ranks.run(loss_and_gradients, 3, renamed(reference.state_dict()), gather):
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        for name, gradient in gradients.items():
            assert_same(gradient, expected_gradients[name], name)
