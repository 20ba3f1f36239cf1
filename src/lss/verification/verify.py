"""The comparison of the serial run with the run over ranks."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lss.batch import shard
from lss.collectives import Axis, agree, agree_equal
from lss.config import AttentionConfig
from lss.context import SequenceContext
from lss.errors import LayoutError, LssError, ModelError
from lss.verification.compare import SMALL, Check, Report, relative_error, report, rounding_bound
from lss.verification.precision import computing_in
from lss.verification.reference import with_serial_dropout
from lss.verification.runs import CLIP_SHARE, FIRST_STEP, Run, evaluate_over_ranks, run_over_ranks, run_plainly
from lss.verification.setting import LossSum, Setting, cross_entropy_sum, without_dropout
from lss.verification.trace import first_differences


def verify(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    attention: AttentionConfig | None = None,
    steps: int = 2,
    loss_sum: LossSum = cross_entropy_sum,
    documents: Sequence[Sequence[int]] | None = None,
    shift_labels: int = 0,
    title: str = "",
    progress: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Compare a model over the ranks of `mesh` with the same model run serially. A collective call.

    Every rank runs the plain model on the whole batch by itself, then all run the parallelized one together. Compared
    are the loss of every step, outputs in training and in evaluation, each parameter's gradient, the gradient norm, and
    parameters and buffers after `steps` steps of SGD with clipping, all without dropout; then, if the model has
    dropout, loss and gradients with it: on the CPU against masks written out again for the plain model,
    elsewhere against one rank alone. If anything differs, both are run again to name the first module that does.

    All is computed in float64, also what the model itself casts to float32; in float32 if the model cannot be run so.
    Of packed or padded batches the plain model is given each document by itself.

    Args:
        model: A plain model, which is left as it is.
        batch: Whole sequences of all data groups: tensors [B, L, ...] under the names of the model's arguments, and
            integer `labels`; also `attention_mask` and `position_ids`, as `shard` takes them in.
        mesh: The mesh to run over.
        attention: How attention is computed, as `parallelize` takes it, and the layout that `shard` cuts by.
        steps: Steps of SGD.
        loss_sum: The loss of outputs and labels, as a sum over tokens; cross-entropy by default.
        documents: Lengths of packed documents, as `shard` takes them.
        shift_labels: As `shard` takes it; by default labels are shifted already.
        title: The report's title.
        progress: Told what is being done.

    Returns:
        A report; `report.passed` says whether all checks hold. The same on every rank.

    Raises:
        LayoutError: The batch cannot be cut.
        ModelError: The plain model cannot be run on the batch, or not be parallelized.
    """
    if steps < 1:
        raise LayoutError(f"steps={steps}", allowed="at least 1")
    whole, attention = _in(torch.float64, batch, mesh), attention or AttentionConfig()
    setting = Setting(whole, mesh, attention, loss_sum, documents, torch.float64, shift_labels)
    _check(setting)
    agree_equal("the model", _digest(model), "make it from one seed on every rank, or load one file")
    progress("serial run")
    serial, setting = agree(lambda: _run_serially(model, setting, steps))
    with computing_in(setting.dtype):
        plain = _plain(model, setting)
        bare, has_dropout = without_dropout(plain)
        bound = _bound(plain, setting)
        progress("run over ranks")
        ranks, context = run_over_ranks(copy.deepcopy(bare), setting, mesh, steps, CLIP_SHARE * serial.norm)
        ranks.evaluated = evaluate_over_ranks(copy.deepcopy(plain), setting)
        checks = _compare(ranks, serial, setting, context, bound)
        checks += _sanity(serial, ranks, setting, context)
        if has_dropout:
            progress("dropout on: serial run, then all ranks")
            checks += _compare_dropout(plain, setting, bound)
        checks = _worst_of_ranks(checks, context, torch.device(mesh.device_type))
        names = ("", "", "")
        if not all(check.passed for check in checks):
            progress("both again, to find the first difference")
            names = first_differences(bare, setting, bound)
    return report(title or setting.title(type(model).__name__), checks, *names)


def _in(dtype: torch.dtype, batch: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, Any]:
    """The batch on the mesh's device, floating tensors in `dtype`; what is no tensor is refused later, by name."""

    def moved(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.to(mesh.device_type, _like(dtype, part))

    return {name: moved(part) for name, part in batch.items()}


def _check(setting: Setting) -> None:
    """Raise LayoutError where the batch cannot be cut, or the plain model cannot have its positions."""
    segment = shard(setting.batch, None, shift_labels=setting.shift_labels, documents=setting.documents)["segment"]
    if "position_ids" in setting.batch and (segment.position_ids is not None or not setting.is_whole):
        given = setting.batch["position_ids"]
        first = [given[row, start].item() for row, pieces in enumerate(setting.pieces) for start, _ in pieces]
        if any(first):
            raise LayoutError(
                f"documents whose position_ids start from {max(first)}",
                allowed="documents from position 0 on: the plain model, which is compared, knows no other positions",
            )


def _plain(model: nn.Module, setting: Setting) -> nn.Module:
    plain = copy.deepcopy(model).to(setting.mesh.device_type)
    plain._apply(lambda part: part.to(_like(setting.dtype, part)))
    return plain.train()


def _like(dtype: torch.dtype, tensor: Tensor) -> torch.dtype:
    """`dtype` for floating tensors, its complex partner for complex ones, their own for others."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def _digest(model: nn.Module) -> str:
    sums = [(name, tuple(part.shape), str(part.double().sum().item())) for name, part in _real_parts(model)]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def _real_parts(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, part in model.state_dict().items():
        yield name, torch.view_as_real(part) if part.is_complex() else part


def _run_serially(model: nn.Module, setting: Setting, steps: int) -> tuple[Run, Setting]:
    """The serial run in float64, or in float32 where the model refuses float64.

    Raises:
        ModelError: The plain model cannot be run on the batch in either: what went wrong is said in a line.
    """
    cause: Exception = RuntimeError()
    for dtype in (torch.float64, torch.float32):
        found = replace(setting, batch=_in(dtype, setting.batch, setting.mesh), dtype=dtype)
        try:
            with computing_in(dtype):
                plain = _plain(model, found)
                run = run_plainly(without_dropout(plain)[0], found, steps)
                with torch.no_grad():
                    run.evaluated = found.run_plainly(plain.eval())
        except LssError:
            raise
        except Exception as error:  # whatever the user's code raises
            cause = error
            continue
        return run, found
    raise ModelError(
        f"the plain model cannot be run on the batch: {type(cause).__name__}: {_first_line(cause)}",
        allowed="a model that returns one tensor [B, L, ...] of the batch's tensors, given by name without labels, "
        "attention_mask and position_ids, which lss.shard takes in; and a loss of that tensor and the labels",
        remedy="take arguments that are taken in out of the model's forward, or give them defaults",
    ) from cause


def _compare(ranks: Run, serial: Run, setting: Setting, context: SequenceContext, bound: float) -> list[Check]:
    checks = _compare_losses(ranks, serial, bound, "loss")
    rank, rows, layout = context.sequence.rank, setting.rows_of_group(context.data), context.layout
    own, real = (layout.shard(part[rows], rank, dim=1, fill=0) for part in (serial.outputs, setting.real))
    checks.append(Check("output", "in training", _error_of_outputs(ranks.outputs, own, real), bound))
    error = _error_of_outputs(ranks.evaluated, serial.evaluated, setting.real)
    checks.append(Check("output", "in evaluation, joined", error, bound))
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
    steps, floor = len(serial.losses), SMALL * _largest(serial.parameters)
    for name, expected in serial.parameters.items():
        error = relative_error(ranks.parameters.get(name, torch.empty(0)), expected, floor)
        checks.append(Check("parameter", f"{name} after {steps} steps", error, bound * steps))
    checks += [Check("replicas", name, math.inf, 0.0) for name in ranks.parameters if name.startswith("replica of ")]
    return checks


def _error_of_outputs(found: Tensor, expected: Tensor, real: Tensor) -> float:
    return relative_error(found[real], expected[real]) if found.shape == expected.shape else math.inf


def _compare_losses(ranks: Run, serial: Run, bound: float, kind: str) -> list[Check]:
    return [
        Check(kind, f"of step {step}", relative_error(torch.tensor(a), torch.tensor(b)), bound * step)
        for step, (a, b) in enumerate(zip(ranks.losses, serial.losses, strict=True), 1)
    ]


def _compare_gradients(ranks: Run, serial: Run, bound: float, kind: str) -> list[Check]:
    largest = _largest(serial.gradients)
    checks = []
    for name in serial.gradients.keys() | ranks.gradients.keys():
        found, expected = (run.gradients.get(name, torch.empty(0)) for run in (ranks, serial))
        checks.append(Check(kind, name, relative_error(found, expected, SMALL * largest), bound))
    return sorted(checks, key=lambda check: check.name)


def _compare_dropout(plain: nn.Module, setting: Setting, bound: float) -> list[Check]:
    """With dropout on: the plain model with the same masks, or one rank alone, against all."""
    if setting.mesh.device_type == "cpu":
        model = copy.deepcopy(plain)
        alone = run_plainly(model, setting, 1, math.inf, with_serial_dropout(model))
    else:
        alone, _ = run_over_ranks(copy.deepcopy(plain), setting, None, 1, math.inf, FIRST_STEP)
    ranks, _ = run_over_ranks(copy.deepcopy(plain), setting, setting.mesh, 1, math.inf, FIRST_STEP)
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


def _largest(tensors: Mapping[str, Tensor]) -> float:
    floating = (part for part in tensors.values() if part.numel() and (part.is_floating_point() or part.is_complex()))
    return max((part.abs().max().item() for part in floating), default=0.0)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


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
    return rounding_bound(setting.dtype, tokens + features) * max(1, depth)


def _worst_of_ranks(checks: list[Check], context: SequenceContext, device: torch.device) -> list[Check]:
    """The same checks with the largest error of any rank; NaN is larger than all."""
    own = torch.tensor([check.error for check in checks], dtype=torch.float64, device=device)
    worst = context.gather_from_ranks(own.nan_to_num(nan=math.inf, posinf=math.inf)).amax(0).tolist()
    return [replace(check, error=error) for check, error in zip(checks, worst, strict=True)]
