"""Models under autocast to bfloat16: as near to the exact ones as the plain model is that runs under it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lss
from tests import pretrained
from tests.models import assert_same, gradients, tiny_gpt
from tests.plain import Decoder
from tests.ranks.test_plain import recompute

LENGTH, RANKS = 29, 2
NEAR = 5 * 2**-8  # of a few roundings to 8 bits
Found = tuple[Tensor, dict[str, Tensor], int]


class Wide(nn.Module):
    """Rotary positions that leave heads in float32, as most code does."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, heads: Tensor, positions: Tensor) -> Tensor:
        return self.rotary(heads.to(torch.promote_types(heads.dtype, torch.float32)), positions)


def attention_layers() -> nn.Module:
    model = tiny_gpt(LENGTH, positions="rotary", key_value_heads=2)
    for block in model.blocks:
        block.attention.rotary = Wide(block.attention.rotary)
    return model


def own_module() -> nn.Module:
    torch.manual_seed(0)
    return Decoder("attribute")


# What is made, how it is parallelized, and numbers of each token that two layers gather: keys and values, or the input.
MODELS = {
    "Llama": (lambda: pretrained.make("Llama"), {}, 2 * 2 * 2 * 8),
    "own module": (own_module, {}, 2 * 2 * 4 * 4),
    "attention layers": (attention_layers, {"gather": "kv"}, 2 * 2 * 2 * 6),
    "their input": (attention_layers, {"gather": "x"}, 2 * 24),
    "their input again": (attention_layers, {"gather": "x", "keep": False}, 2 * 24),
}


def batch_of(name: str) -> dict[str, Tensor]:
    tokens = torch.randint(3, 17, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids" if name == "Llama" else "tokens": tokens, "labels": F.pad(tokens[:, 1:], (0, 1), value=-100)}


def logits_of(model: nn.Module, batch: dict[str, object]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found = model(**batch)
    return found if isinstance(found, Tensor) else found.logits


def over_ranks(name: str, dtype: torch.dtype, how: str = "") -> Found:
    """Logits, gradients, and bytes gathered in forward."""
    mesh, (make, options, _) = lss.init_mesh(RANKS, device="cpu"), MODELS[name]
    model = lss.parallelize(make().to(dtype), mesh, **options)
    if how == "recomputed":
        model.activation_checkpointing_enable() if name == "Llama" else recompute(model, "modules")
    batch = lss.shard(batch_of(name), mesh, shift_labels=0)
    labels = batch.pop("labels")
    with torch.set_grad_enabled(how != "evaluated"):
        logits = logits_of(model.train(how != "evaluated"), batch)
    if how != "evaluated":
        lss.token_mean_cross_entropy(logits, labels, lss.count_tokens(model, labels)).backward()
        lss.average_gradients(model)
    sent = lss.context_of(model).ledger.total(operation="all_gather", phase="forward")[1]
    return lss.unshard(logits, batch["segment"], mesh), gradients(model), sent


def plain(name: str, dtype: torch.dtype) -> Found:
    """The same of the plain model."""
    model, batch = MODELS[name][0]().to(dtype), batch_of(name)
    labels = batch.pop("labels")
    logits = logits_of(model, batch)
    F.cross_entropy(logits.to(dtype).flatten(0, 1), labels.flatten()).backward()
    return logits.detach(), gradients(model), 0


def error(found: Tensor, expected: Tensor) -> float:
    """By the L2 norm."""
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_that_of_the_plain_model(ranks, name):
    (logits, grads, _), (exact, exact_grads, _) = plain(name, torch.float32), plain(name, torch.float64)
    tokens = 2 * -(-LENGTH // RANKS) * (RANKS - 1)
    for found, found_grads, sent in ranks.run(over_ranks, RANKS, name, torch.float32):
        assert (found.dtype, sent) == (torch.bfloat16, tokens * MODELS[name][2] * 2)
        assert error(found, logits.double()) < NEAR
        assert error(found, exact) < 2 * error(logits, exact)
        assert found_grads.keys() == grads.keys()
        for weight, gradient in found_grads.items():
            assert error(gradient, grads[weight].double()) < NEAR, weight
            assert error(gradient, exact_grads[weight]) < 2 * error(grads[weight], exact_grads[weight]), weight


@pytest.mark.parametrize("name", MODELS)
def test_autocast_leaves_float64_alone(ranks, name):
    logits, grads, _ = plain(name, torch.float64)
    for found, found_grads, _ in ranks.run(over_ranks, RANKS, name, torch.float64):
        assert_same(found, logits, "logits", 1e-12)
        for weight, gradient in grads.items():
            assert_same(found_grads[weight], gradient, weight, 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_autocast_in_recomputation_and_evaluation(ranks, name):
    logits, grads, _ = ranks.run(over_ranks, RANKS, name, torch.float32)[0]
    again, grads_again, _ = ranks.run(over_ranks, RANKS, name, torch.float32, "recomputed")[0]
    assert torch.equal(again, logits)
    for weight, gradient in grads.items():
        assert torch.equal(grads_again[weight], gradient), weight
    assert torch.equal(ranks.run(over_ranks, RANKS, name, torch.float32, "evaluated")[0][0], logits)


def test_deep_models_are_tried_by_what_16_bits_can_tell(command, tmp_path):
    """Float32 sums of products in 16 bits differ by the rounding of these."""
    told = (
        "--train.steps",
        "1",
        "--train.precision",
        "bf16",
        "--parallel.sequence",
        "2",
        "--train.eval_sequences",
        "1",
    )
    result = command("train", *told, "--run.folder", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
