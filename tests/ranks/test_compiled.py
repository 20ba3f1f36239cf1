"""torch.compile of a parallelized model: the same numbers, and graphs that end at attention and positions alone."""

import pytest
import torch

import lss
from tests.models import tiny_gpt, tokens_and_labels

LENGTH = 12


def steps(compiled: bool, dropout: float) -> tuple[list[float], list[str]]:
    """Losses and gradient norms of three batches of two lengths, and where graphs end."""
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(tiny_gpt(LENGTH, dropout=dropout, attention_dropout=dropout), mesh)
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    call = torch.compile(model, backend="aot_eager") if compiled else model
    found = []
    for length in (LENGTH, LENGTH, 7):
        tokens, labels = tokens_and_labels(1, length)
        batch = lss.shard({"tokens": tokens, "labels": labels}, mesh, shift_labels=0)
        model.zero_grad()
        logits = call(batch["tokens"], segment=batch["segment"])
        loss = lss.token_mean_cross_entropy(logits, batch["labels"], lss.count_tokens(model, batch["labels"]))
        loss.backward()
        lss.average_gradients(model)
        found += [lss.context_of(model).sum_over_ranks(loss.detach()).item(), lss.gradient_norm(model).item()]
    ends = torch._dynamo.utils.counters["graph_break"] if compiled else {}
    return found, [reason.split("the function `")[1].split("`")[0] for reason in ends]


@pytest.mark.supports("GPT", "torch.compile")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_compiled_model_is_the_same(ranks, dropout):
    (expected, _), *_ = ranks.run(steps, 2, False, dropout)
    for found, ends in ranks.run(steps, 2, True, dropout):
        assert found == pytest.approx(expected, rel=1e-12)
        places = {"ShardedPositions.forward", "DistributedAttention.__call__"}
        assert set(ends) - {"Locality.require"} == places | ({"drop"} if dropout else set())
