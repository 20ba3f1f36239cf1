"""The serial run, by plain PyTorch, and the run over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lss.batch import shard, unshard
from lss.context import SequenceContext, context_of
from lss.gradients import average_gradients, clip_gradient_norm, replicas_that_differ
from lss.losses import count_tokens, token_mean_cross_entropy
from lss.parallelize import full_gradients, full_state_dict, parallelize
from lss.verification.reference import Place
from lss.verification.setting import Setting, cross_entropy_sum

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
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    evaluated: Tensor = field(default_factory=lambda: torch.empty(0))
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
    run, labels = Run(), setting.labels
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        if place:
            place.step = FIRST_STEP + step
        outputs = setting.run_plainly(model, _mover(place))
        loss = setting.loss_sum(outputs, labels) / (labels != -100).sum().clamp(min=1)
        loss.backward()
        run.losses.append(loss.item())
        if step == 0:
            run.outputs = outputs.detach()
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
    model = parallelize(model, mesh, **asdict(setting.attention))
    context = context_of(model)
    batch, labels = sharded(setting, context, mesh)
    context.num_trained = first_step
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        context.ledger.clear()
        count = count_tokens(model, labels).clamp(min=1)
        outputs = model(**batch)
        loss = share_of_loss(setting, outputs, labels, count)
        loss.backward()
        average_gradients(model)
        run.losses.append(context.sum_over_ranks(loss.detach()).item())
        if step == 0:
            run.outputs = outputs.detach()
            run.gradients = {name: gradient.clone() for name, gradient in full_gradients(model).items()}
        norm = clip_gradient_norm(model, max_norm)
        run.norm = norm.item() if step == 0 else run.norm
        optimizer.step()
    run.parameters = full_state_dict(model)
    different = replicas_that_differ(model)
    run.parameters |= {f"replica of {name}": torch.empty(0) for name in different}
    return run, context


def share_of_loss(setting: Setting, outputs: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """This rank's share of the loss, by the function that users call where it is the default."""
    if setting.loss_sum is cross_entropy_sum:
        return token_mean_cross_entropy(outputs, labels, count)
    return setting.loss_sum(outputs, labels) / count


def evaluate_over_ranks(model: nn.Module, setting: Setting) -> Tensor:
    """Outputs of whole sequences in evaluation, of all data groups: [B, L, ...]."""
    model = parallelize(model, setting.mesh, **asdict(setting.attention)).eval()
    batch, _ = sharded(setting, context_of(model), setting.mesh)
    with torch.no_grad():
        outputs: Tensor = model(**batch)
    return unshard(outputs, batch["segment"], setting.mesh, data_groups=True)  # type: ignore[arg-type]


def sharded(setting: Setting, context: SequenceContext, mesh: DeviceMesh | None) -> tuple[dict[str, Tensor], Tensor]:
    """The model's arguments for this rank's slots, and their labels."""
    whole, documents = setting.of_group(context.data)
    batch = shard(whole, mesh, shift_labels=setting.shift_labels, documents=documents, layout=setting.attention.layout)
    labels = batch.pop("labels")
    return batch, labels


def _mover(place: Place | None) -> Callable[[int, slice], None]:
    def move(row: int, slots: slice) -> None:
        if place:
            place.row, place.start = row, slots.start

    return move
