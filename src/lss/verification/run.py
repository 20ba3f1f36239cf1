"""The serial run, the run over ranks, and their comparison."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lss.attention import Gather
from lss.batch import shard
from lss.collectives import Axis, agree
from lss.context import SequenceContext, context_of
from lss.errors import LayoutError, ModelError
from lss.gradients import average_gradients, clip_gradient_norm, replicas_that_differ
from lss.losses import count_tokens
from lss.parallelize import full_gradients, full_state_dict, parallelize
from lss.verification.compare import SMALL, Check, Report, relative_error, report, rounding_bound
from lss.verification.setting import LossSum, Setting, cross_entropy_sum, without_dropout
from lss.verification.trace import first_differences

# Steps are clipped to half of the first norm, so that a wrong norm shows in the parameters.
CLIP_SHARE = 0.5
LEARNING_RATE = 0.1


@dataclass
class Run:
    """What a run gave: the loss of each step; outputs, gradients and norm of the first; parameters at the end."""

    losses: list[float] = field(default_factory=list)
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norm: float = math.nan
    parameters: dict[str, Tensor] = field(default_factory=dict)


def verify(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    gather: Gather = "x",
    steps: int = 2,
    loss_sum: LossSum = cross_entropy_sum,
    title: str = "",
    progress: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Compare a model over the ranks of `mesh` with the same model run serially. A collective call.

    Every rank runs the plain model on the whole batch by itself, in float64, then all run the parallelized one
    together. Compared are the loss of every step, outputs, each parameter's gradient, the gradient norm, and the
    parameters after `steps` steps of SGD with clipping, all without dropout; then, if the model has dropout, loss and
    gradients with it against one rank. If anything differs, both are run again to name the first module that does.

    Args:
        model: A plain model, which is left as it is.
        batch: Whole sequences of all data groups: tensors [B, L, ...] under the names of the model's arguments, and
            integer `labels`, shifted already.
        mesh: The mesh to run over.
        gather: What attention layers gather.
        steps: Steps of SGD.
        loss_sum: The loss of outputs and labels, as a sum over tokens; cross-entropy by default.
        title: The report's title.
        progress: Told what is being done.

    Returns:
        A report; `report.passed` says whether all checks hold. The same on every rank.
    """
    if steps < 1:
        raise LayoutError(f"steps={steps}", allowed="at least 1")
    plain, whole = _in_float64(model, batch, torch.device(mesh.device_type))
    setting = Setting(whole, mesh, gather, loss_sum)
    bare, had_dropout = without_dropout(plain)
    progress("serial run")
    serial = agree(partial(_run_serially, copy.deepcopy(bare), setting, steps))
    progress("run over ranks")
    ranks, context = _run_over_ranks(copy.deepcopy(bare), setting, mesh, steps, CLIP_SHARE * serial.norm)
    checks = _compare(ranks, serial, setting, context, _bound(plain, setting))
    checks += _sanity(serial, ranks, setting, context)
    if had_dropout:
        progress("dropout on: one rank, then all")
        checks += _compare_dropout(plain, setting)
    checks = _worst_of_ranks(checks, context, torch.device(mesh.device_type))
    names = ("", "")
    if not all(check.passed for check in checks):
        progress("both again, to find the first difference")
        names = first_differences(bare, setting, _bound(plain, setting))
    return report(title or setting.title(type(model).__name__), checks, *names)


def _in_float64(
    model: nn.Module, batch: Mapping[str, Tensor], device: torch.device
) -> tuple[nn.Module, dict[str, Tensor]]:
    whole = {
        name: (part.double() if part.is_floating_point() else part).to(device) if isinstance(part, Tensor) else part
        for name, part in batch.items()
    }
    return copy.deepcopy(model).double().to(device).train(), whole


def _run_serially(model: nn.Module, setting: Setting, steps: int) -> Run:
    """The serial run; what goes wrong in the user's own code is said in a line."""
    try:
        return _run_plainly(model, setting, steps)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise ModelError(
            f"the plain model cannot be run on the batch: {type(error).__name__}: {str(error).splitlines()[0]}",
            allowed="a model of the batch's tensors by name that returns one tensor, and a loss of it and the labels",
        ) from error


def _run_plainly(model: nn.Module, setting: Setting, steps: int) -> Run:
    """Plain PyTorch: nothing of this package is called."""
    run, labels = Run(), setting.batch["labels"]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        outputs = model(**setting.inputs)
        loss = setting.loss_sum(outputs, labels) / (labels != -100).sum().clamp(min=1)
        loss.backward()
        run.losses.append(loss.item())
        if step == 0:
            run.outputs = outputs.detach()
            run.gradients = {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}
            run.norm = nn.utils.get_total_norm(run.gradients.values()).item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_SHARE * run.norm)
        optimizer.step()
    run.parameters = dict(model.state_dict())
    return run


def _run_over_ranks(
    model: nn.Module, setting: Setting, mesh: DeviceMesh | None, steps: int, max_norm: float
) -> tuple[Run, SequenceContext]:
    """The same through this package; over one rank alone where there is no mesh."""
    run = Run()
    model = parallelize(model, mesh, gather=setting.gather)
    context = context_of(model)
    batch = shard(setting.of_group(context.data), mesh, shift_labels=0)
    labels = batch.pop("labels")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        context.ledger.clear()
        count = count_tokens(model, labels).clamp(min=1)
        outputs = model(**batch)
        loss = setting.loss_sum(outputs, labels) / count
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


def _compare(ranks: Run, serial: Run, setting: Setting, context: SequenceContext, bound: float) -> list[Check]:
    checks = _compare_losses(ranks, serial, bound, "loss")
    rows, layout = setting.rows_of_group(context.data), context.layout
    own = layout.num_tokens(context.sequence.rank)
    expected = layout.shard(serial.outputs[rows], context.sequence.rank, dim=1, fill=0)
    checks.append(Check("output", "of the model", relative_error(ranks.outputs[:, :own], expected[:, :own]), bound))
    checks += _compare_gradients(ranks, serial, bound, "gradient")
    checks.append(
        Check(
            "norm",
            "of the gradient",
            relative_error(torch.tensor(ranks.norm), torch.tensor(serial.norm)),
            bound,
            "shared parameters count once, positional rows over their owners",
        )
    )
    steps = len(serial.losses)
    for name, expected in serial.parameters.items():
        found = ranks.parameters.get(name, torch.empty(0))
        checks.append(Check("parameter", f"{name} after {steps} steps", relative_error(found, expected), bound * steps))
    checks += [Check("replicas", name, math.inf, 0.0) for name in ranks.parameters if name.startswith("replica of ")]
    return checks


def _compare_losses(ranks: Run, serial: Run, bound: float, kind: str) -> list[Check]:
    return [
        Check(kind, f"of step {step}", relative_error(torch.tensor(a), torch.tensor(b)), bound * step)
        for step, (a, b) in enumerate(zip(ranks.losses, serial.losses, strict=True), 1)
    ]


def _compare_gradients(ranks: Run, serial: Run, bound: float, kind: str) -> list[Check]:
    largest = max((gradient.abs().max().item() for gradient in serial.gradients.values()), default=0.0)
    checks = []
    for name in serial.gradients.keys() | ranks.gradients.keys():
        found, expected = (run.gradients.get(name, torch.empty(0)) for run in (ranks, serial))
        checks.append(Check(kind, name, relative_error(found, expected, SMALL * largest), bound))
    return sorted(checks, key=lambda check: check.name)


def _compare_dropout(plain: nn.Module, setting: Setting) -> list[Check]:
    """With dropout on: one rank alone against all."""
    alone, _ = _run_over_ranks(copy.deepcopy(plain), setting, None, 1, math.inf)
    ranks, _ = _run_over_ranks(copy.deepcopy(plain), setting, setting.mesh, 1, math.inf)
    bound = _bound(plain, setting)
    return [
        *_compare_losses(ranks, alone, bound, "loss, dropout"),
        *_compare_gradients(ranks, alone, bound, "gradient, dropout"),
    ]


def _sanity(serial: Run, ranks: Run, setting: Setting, context: SequenceContext) -> list[Check]:
    """What makes a comparison worthless: nothing learns, or nothing was sent."""
    dead = sum(not gradient.any() for gradient in serial.gradients.values())
    chance = math.log(serial.outputs.size(-1)) if serial.outputs.size(-1) > 1 else math.nan
    at_chance = abs(serial.losses[0] - chance) < 1e-6 * chance
    used = _used(context)
    return [
        _sane("more than one rank", bool(used), "nothing was sent: one rank proves nothing about several"),
        _sane("some gradient is not zero", dead < len(serial.gradients), "all gradients are zero"),
        _sane("the loss can move", not (at_chance and dead), "the loss is that of chance and gradients are dead"),
        *(_sane(f"messages on the {axis.name} axis", _sent(axis), "nothing was sent") for axis in used),
    ]


def _used(context: SequenceContext) -> list[Axis]:
    return [axis for axis in (context.sequence, context.data) if axis.size > 1]


def _sent(axis: Axis) -> bool:
    ledger = axis.ledger
    averaged = ledger.total(axis=axis.name, layer="gradients")[0] > 0
    return averaged and (axis.name == "data" or ledger.total(axis=axis.name, phase="forward")[0] > 0)


def _sane(name: str, good: bool, note: str) -> Check:
    return Check("sanity", name, 0.0 if good else math.inf, 0.0, note)


def _bound(model: nn.Module, setting: Setting) -> float:
    """Sums are over tokens (weights' gradients, softmax) or features (products), module after module."""
    tokens = setting.batch["labels"].numel()
    features = max((max(weight.shape, default=1) for weight in model.parameters()), default=1)
    depth = sum(1 for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    return rounding_bound(torch.float64, tokens + features) * max(1, depth)


def _worst_of_ranks(checks: list[Check], context: SequenceContext, device: torch.device) -> list[Check]:
    """The same checks with the largest error of any rank; NaN is larger than all."""
    own = torch.tensor([check.error for check in checks], dtype=torch.float64, device=device)
    worst = context.gather_from_ranks(own.nan_to_num(nan=math.inf, posinf=math.inf)).amax(0).tolist()
    return [replace(check, error=error) for check, error in zip(checks, worst, strict=True)]
