"""The serial run, by plain PyTorch, and the run over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lss.batch import shard, unshard
from lss.context import SequenceContext, context_of
from lss.gradients import average_gradients, clip_gradient_norm, replicas_that_differ
from lss.losses import count_tokens, token_mean_cross_entropy
from lss.outputs import Outputs
from lss.state import full_gradients, full_state_dict
from lss.strategies import parallelize_as
from lss.verification.reference import Place
from lss.verification.setting import Setting

# Steps are clipped to half of the first norm, so that a wrong norm shows in the parameters.
CLIP_SHARE = 0.5
LEARNING_RATE = 0.1
# Where dropout is on: so that masks which do not depend on the step differ.
FIRST_STEP = 3


@dataclass
class Run:
    """What a run gave: the loss of each step; outputs, gradients and norm of the first; parameters at the end.

    Outputs are those of the first step, in training, and in evaluation with dropout as the model has it.
    """

    losses: list[float] = field(default_factory=list)
    outputs: Outputs = field(default_factory=lambda: Outputs({}))
    evaluated: Outputs = field(default_factory=lambda: Outputs({}))
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norm: float = math.nan
    parameters: dict[str, Tensor] = field(default_factory=dict)


def run_plainly(
    model: nn.Module, setting: Setting, steps: int, max_norm: float | None = None, place: Place | None = None
) -> Run:
    """Plain PyTorch: nothing of this package is called. The model is changed.

    Args:
        model: The plain model.
        setting: The batch.
        steps: Steps.
        max_norm: Of gradients; half of the first norm by default.
        place: Told where the run is, if the model draws dropout masks.
    """
    run = Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        if place:
            place.step = FIRST_STEP + step
        outputs = setting.run_plainly(model, _mover(place))
        assert outputs.loss is not None
        outputs.loss.backward()
        run.losses.append(outputs.loss.item())
        if step == 0:
            run.outputs = outputs.detached()
            run.gradients = {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}
            run.norm = nn.utils.get_total_norm(run.gradients.values()).item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_SHARE * run.norm if max_norm is None else max_norm)
        optimizer.step()
    run.parameters = dict(model.state_dict())
    return run


def run_over_ranks(
    model: nn.Module, setting: Setting, mesh: DeviceMesh | None, steps: int, max_norm: float, first_step: int = 0
) -> tuple[Run, SequenceContext]:
    """The same through this package; over one rank alone where there is no mesh. The model is changed."""
    run = Run()
    model, batch, labels = two_lines(model, setting, mesh)
    context = context_of(model)
    context.num_trained = first_step
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        context.ledger.clear()
        share, outputs = call_over_ranks(model, setting, batch, labels)
        share.backward()
        average_gradients(model)
        assert outputs.loss is not None
        run.losses.append(outputs.loss.item())
        if step == 0:
            run.outputs = outputs.detached()
            run.gradients = {name: gradient.clone() for name, gradient in full_gradients(model).items()}
        norm = clip_gradient_norm(model, max_norm)
        run.norm = norm.item() if step == 0 else run.norm
        optimizer.step()
    run.parameters = full_state_dict(model)
    different = replicas_that_differ(model)
    run.parameters |= {f"replica of {name}": torch.empty(0) for name in different}
    return run, context


def call_over_ranks(
    model: nn.Module, setting: Setting, batch: dict[str, Tensor], labels: Tensor
) -> tuple[Tensor, Outputs]:
    """Call a parallelized model on this rank's segment, as users do.

    Returns:
        What backward starts from, and the outputs with the loss of all ranks. The two losses are one where the model
        works it out itself; else backward starts from this rank's share.
    """
    has_labels = setting.gives_labels(model)
    returned = model(**batch, **({"labels": labels} if has_labels else {}))
    outputs = Outputs.of(returned, labels.shape[: len(setting.of_tokens)], has_labels=has_labels)
    if outputs.loss is not None:
        return outputs.loss, outputs
    count = count_tokens(model, labels).clamp(min=1)
    if setting.loss_sum is None:
        share = token_mean_cross_entropy(outputs.logits, labels, count)
    else:
        share = setting.loss_sum(outputs.logits, labels) / count
    return share, replace(outputs, loss=context_of(model).sum_over_ranks(share.detach()))


def evaluate_over_ranks(model: nn.Module, setting: Setting) -> Outputs:
    """Outputs of whole sequences in evaluation, of all data groups: [B, L, ...]; and the loss."""
    model, batch, labels = two_lines(model, setting, setting.mesh)
    model.eval()
    with torch.no_grad():
        _, outputs = call_over_ranks(model, setting, batch, labels)
    segment: Any = batch["segment"]
    whole = {name: unshard(part, segment, setting.mesh, data_groups=True) for name, part in outputs.tensors.items()}
    return replace(outputs, tensors=whole)


def two_lines(
    model: nn.Module, setting: Setting, mesh: DeviceMesh | None
) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """What users write: the model parallelized, in place, its arguments for this rank's slots, and their labels."""
    strategy = setting.strategy if mesh is not None else "lss"
    model = parallelize_as(strategy, model, mesh, cut=setting.cut, **asdict(setting.attention))
    whole, documents = setting.of_group(context_of(model).data)
    layout, shift = setting.attention.layout, setting.shift_labels
    batch = shard(whole, mesh, shift_labels=shift, documents=documents, layout=layout, cut=setting.cut)
    labels = batch.pop("labels")
    return model, batch, labels


def _mover(place: Place | None) -> Callable[[int, slice], None]:
    def move(row: int, slots: slice) -> None:
        if place:
            place.row, place.start = row, slots.start

    return move
