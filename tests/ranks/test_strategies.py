"""Rivals over ranks equal the serial run, and send what they are said to send."""

import pytest
import torch
from torch.nn import functional as F

import lss
from lss.models import GPT
from lss.state import full_gradients
from lss.strategies.megatron import parallelize_as_megatron
from tests.models import assert_same, tiny_gpt, tokens_and_labels

LENGTH = 13


def run_megatron(layout: str, kernel: str) -> tuple[dict[str, torch.Tensor], list[dict]]:
    mesh = lss.init_mesh(torch.distributed.get_world_size(), device="cpu")
    model = parallelize_as_megatron(tiny_gpt(LENGTH), mesh, layout=layout, kernel=kernel)
    tokens, labels = tokens_and_labels(2, LENGTH)
    batch = lss.shard({"tokens": tokens, "labels": labels}, mesh, shift_labels=0, layout=layout)
    logits = model(batch["tokens"], segment=batch["segment"])
    count = lss.count_tokens(model, batch["labels"])
    lss.token_mean_cross_entropy(logits, batch["labels"], count).backward()
    lss.average_gradients(model)
    return full_gradients(model), lss.context.context_of(model).ledger.rows()


@pytest.mark.parametrize(("layout", "kernel"), [("contiguous", "stored"), ("zigzag", "auto")])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_megatron_as_the_paper_describes_it(ranks, num_ranks, layout, kernel):
    model = tiny_gpt(LENGTH)
    tokens, labels = tokens_and_labels(2, LENGTH)
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    for gradients, rows in ranks.run(run_megatron, num_ranks, layout, kernel):
        for name, weight in model.named_parameters():
            assert_same(gradients[name], weight.grad, name)
        of_blocks = [row for row in rows if row["layer"].startswith("blocks.")]
        sent = {(row["operation"], row["pass"]): 0 for row in of_blocks}
        for row in of_blocks:
            sent[row["operation"], row["pass"]] += row["count"]
        number = 2 * len(model.blocks)  # one of each for attention, one for the feed-forward
        assert sent == {
            ("all_gather", "forward"): number,
            ("reduce_scatter", "forward"): number,
            ("all_gather", "backward"): number,
            ("reduce_scatter", "backward"): number,
        }


def test_megatron_takes_models_of_this_package():
    with pytest.raises(lss.errors.ModelError, match="Linear with the strategy megatron"):
        parallelize_as_megatron(torch.nn.Linear(2, 2), None)
    assert isinstance(parallelize_as_megatron(tiny_gpt(LENGTH), None), GPT)
