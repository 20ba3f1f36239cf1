"""Experts, each of which is given some tokens in an order of its own: taken as they are."""

import warnings

import pytest
import torch
import transformers
from torch import Tensor, nn

import lss
from tests.plain import WIDTH, tokens
from tests.ranks.test_locality import Around
from tests.ranks.test_trial import outcome


def dispatched(model: Around, x: Tensor) -> Tensor:
    """Experts that are given their tokens sorted, whose sums are all next to zero."""
    flat = nn.functional.layer_norm(x, (WIDTH,)).reshape(-1, WIDTH)
    chosen = flat[:, :4].argmax(1)
    order = chosen.argsort(stable=True)
    made = [model.experts[n](part) for n, part in enumerate(flat[order].split(chosen.bincount(minlength=4).tolist()))]
    return x + torch.empty_like(flat).index_copy(0, order, torch.cat(made)).view_as(x)


def sorted_experts(dtype: torch.dtype) -> tuple:
    return outcome(Around, what=dispatched, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sorted_experts_are_taken(ranks, dtype):
    torch.manual_seed(0)
    expected = Around(dispatched).to(dtype)(tokens()).detach()
    for (found,), told in ranks.run(sorted_experts, 2, dtype):
        torch.testing.assert_close(found, expected)
        assert not told


def in_bfloat16() -> float:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    shape = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        num_key_value_heads=2, num_local_experts=8, head_dim=8, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    model = lss.parallelize(transformers.GptOssForCausalLM(shape).bfloat16(), mesh)
    batch = torch.randint(3, 64, (2, 160))
    return model(**lss.shard({"input_ids": batch, "labels": batch}, mesh, shift_labels=1)).loss.item()


def test_experts_in_bfloat16_are_taken(ranks):
    for loss in ranks.run(in_bfloat16, 2):
        assert 3.8 < loss < 4.6


def mixtral(implementation: str | None) -> float:
    mesh = lss.init_mesh(2, device="cpu")
    torch.manual_seed(0)
    shape = transformers.MixtralConfig(
        vocab_size=31, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        num_key_value_heads=2, num_local_experts=8, experts_implementation=implementation,
    )  # fmt: skip
    model = lss.parallelize(transformers.MixtralForCausalLM(shape), mesh)
    batch = {"input_ids": tokens(60), "labels": tokens(60)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return model(**lss.shard(batch, mesh, shift_labels=1)).loss.item()


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_experts_of_transformers_are_taken(ranks, implementation):
    for loss in ranks.run(mixtral, 2, implementation):
        assert 3 < loss < 4
