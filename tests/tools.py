"""A short training of a small model, plain or over ranks, for tests of what users wrap around it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import lss
from lss.verification.precision import computing_in
from tests import pretrained
from tests.models import assert_same, tiny_gpt

LENGTH, STEPS, MICRO_BATCHES, SEQUENCES = 13, 3, 2, 4
MAX_NORM = 0.5
OPTIMIZERS = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01),
}
# Losses, norms and first gradients of a training, and what the weights become.
Found = dict[str, dict[str, Tensor]]


def make(name: str) -> nn.Module:
    """A GPT of lss.models, or one of transformers, in float64."""
    return tiny_gpt(LENGTH) if name == "GPT" else pretrained.make(name)


def micro_batch(name: str, index: int) -> dict[str, Tensor]:
    """Four sequences, some labels ignored; the labels of a GPT are shifted."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(3, 17, (SEQUENCES, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone() if name == "GPT" else tokens[:, :-1].clone()
    labels[1, 5] = labels[2, 9] = -100
    return {"tokens" if name == "GPT" else "input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def plainly(model: nn.Module, name: str, optimizer: str, widened: bool = True) -> Found:
    """The training by torch alone; `name` is that of the wrapped model, `widened` whether casts are to float64."""

    def loss_of(index: int) -> Tensor:
        batch = micro_batch(name, index)
        if name != "GPT":
            return model(**batch).loss / MICRO_BATCHES
        logits = model(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100) / MICRO_BATCHES

    def finish() -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    def gradients() -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    return train(model, optimizer, loss_of, finish, gradients, lambda: dict(model.state_dict()), widened)


def over(
    mesh: DeviceMesh,
    model: nn.Module,
    name: str,
    optimizer: str,
    call: Callable[..., object] | None = None,
    widened: bool = True,
) -> Found:
    """The same of a parallelized model; `call` is what is called in its place."""
    call, data = call or model.__call__, lss.context_of(model).data
    rows = slice(data.rank * SEQUENCES // data.size, (data.rank + 1) * SEQUENCES // data.size)

    def loss_of(index: int) -> Tensor:
        batch = {key: value[rows] for key, value in micro_batch(name, index).items()}
        batch = lss.shard(batch, mesh, shift_labels=int(name != "GPT"))
        if name != "GPT":
            return call(**batch).loss / MICRO_BATCHES
        logits = call(batch["tokens"], segment=batch["segment"])
        count = lss.count_tokens(model, batch["labels"])
        share = lss.token_mean_cross_entropy(logits, batch["labels"], count) / MICRO_BATCHES
        return share + (lss.context_of(model).sum_over_ranks(share.detach()) - share.detach())  # show the whole

    def finish() -> Tensor:
        lss.average_gradients(model)
        return lss.clip_gradient_norm(model, MAX_NORM)

    def gradients() -> dict[str, Tensor]:
        return lss.full_gradients(model)

    return train(model, optimizer, loss_of, finish, gradients, lambda: lss.full_state_dict(model), widened)


def train(
    model: nn.Module,
    optimizer: str,
    loss_of: Callable[[int], Tensor],
    finish: Callable[[], Tensor],
    gradients: Callable[[], dict[str, Tensor]],
    weights: Callable[[], dict[str, Tensor]],
    widened: bool,
) -> Found:
    """Steps of two micro-batches each, with clipping."""
    steps = OPTIMIZERS[optimizer](weight for weight in model.parameters() if weight.requires_grad)
    told, first = {}, {}
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            with computing_in(torch.float64 if widened else torch.float32):
                loss = loss_of(step * MICRO_BATCHES + micro)
                loss.backward()
            told[f"loss {step}.{micro}"] = loss.detach()
        told[f"norm {step}"] = finish().detach()
        first = first or {name: gradient.clone() for name, gradient in gradients().items()}
        steps.step()
        steps.zero_grad()
    return {"told": told, "gradients": first, "weights": {name: w.detach().clone() for name, w in weights().items()}}


def assert_equal(found: Found, expected: Found, tolerance: float = 1e-9) -> None:
    """Every loss, norm, gradient and weight."""
    for part in expected:
        assert found[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            if value.is_floating_point():
                assert_same(found[part][name], value, name, tolerance)
