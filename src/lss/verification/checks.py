"""The checks of a run over ranks against the serial one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lss.collectives import Axis
from lss.context import SequenceContext
from lss.outputs import Outputs
from lss.segment import Segment
from lss.verification.compare import SMALL, Check, relative_error, rounding_bound
from lss.verification.runs import Run
from lss.verification.setting import Setting

_OF_LOSS = (
    "where outputs are equal: say by shift_labels how far labels are to be shifted, and see that the loss is the mean "
    "over the labels of all ranks; one that the model works out itself is, in models of transformers"
)
_OF_NORM = "shared parameters count once, positional rows over their owners"


def compare(ranks: Run, serial: Run, setting: Setting, context: SequenceContext, bound: float) -> list[Check]:
    """All that both runs gave, without dropout, as this rank sees it."""
    checks = [*compare_losses(ranks, serial, bound, "loss"), *_compare_outputs(ranks, serial, setting, context, bound)]
    checks += compare_gradients(ranks, serial, bound, "gradient")
    checks.append(Check("norm", "of the gradient", _error_of_numbers(ranks.norm, serial.norm), bound, _OF_NORM))
    steps, floor = len(serial.losses), SMALL * _largest(serial.parameters)
    for name, expected in serial.parameters.items():
        error = relative_error(ranks.parameters.get(name, torch.empty(0)), expected, floor)
        checks.append(Check("parameter", f"{name} after {steps} steps", error, bound * steps))
    checks += [Check("replicas", name, math.inf, 0.0) for name in ranks.parameters if name.startswith("replica of ")]
    return checks


def _compare_outputs(ranks: Run, serial: Run, setting: Setting, context: SequenceContext, bound: float) -> list[Check]:
    rank, rows = context.sequence.rank, setting.rows_of_group(context.data)
    missing, checks = torch.empty(0), []
    for name, whole in serial.outputs.tensors.items():
        own, real = (part[rows] for part in (whole, setting.real))
        if isinstance(context.target, Segment):
            layout = context.target.layout
            own, real = (layout.shard(part, rank, dim=1, fill=0) for part in (own, real))
        error = _error_of_outputs(ranks.outputs.tensors.get(name, missing), own, real)
        checks.append(Check("output", f"{name} in training".lstrip(), error, bound))
    for name, whole in serial.evaluated.tensors.items():
        error = _error_of_outputs(ranks.evaluated.tensors.get(name, missing), whole, setting.real)
        checks.append(Check("output", f"{name} in evaluation, joined".lstrip(), error, bound))
    error = _error_of_numbers(*(_loss(run.evaluated) for run in (ranks, serial)))
    return [*checks, Check("loss", "in evaluation", error, bound, _OF_LOSS)]


def _loss(outputs: Outputs) -> float:
    assert outputs.loss is not None
    return outputs.loss.item()


def _error_of_outputs(found: Tensor, expected: Tensor, real: Tensor) -> float:
    return relative_error(found[real], expected[real]) if found.shape == expected.shape else math.inf


def _error_of_numbers(found: float, expected: float) -> float:
    return relative_error(*torch.tensor([found, expected], dtype=torch.float64))


def compare_losses(ranks: Run, serial: Run, bound: float, kind: str) -> list[Check]:
    """The loss of each step; the bound grows with the steps."""
    return [
        Check(kind, f"of step {step}", _error_of_numbers(*pair), bound * step, _OF_LOSS)
        for step, pair in enumerate(zip(ranks.losses, serial.losses, strict=True), 1)
    ]


def compare_gradients(ranks: Run, serial: Run, bound: float, kind: str) -> list[Check]:
    """Every gradient that one of the two has."""
    largest = _largest(serial.gradients)
    checks = []
    for name in serial.gradients.keys() | ranks.gradients.keys():
        found, expected = (run.gradients.get(name, torch.empty(0)) for run in (ranks, serial))
        checks.append(Check(kind, name, relative_error(found, expected, SMALL * largest), bound))
    return sorted(checks, key=lambda check: check.name)


def sanity(serial: Run, ranks: Run, setting: Setting, context: SequenceContext) -> list[Check]:
    """What makes a comparison worthless: nothing learns, or nothing was sent."""
    dead = sum(not gradient.any() for gradient in serial.gradients.values())
    width = serial.outputs.logits.size(-1)
    chance = math.log(width) if width > 1 else math.nan
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


def _used(context: SequenceContext) -> list[Axis]:
    return [axis for axis in (context.sequence, context.data) if axis.size > 1]


def _sent(axis: Axis) -> bool:
    ledger = axis.ledger
    averaged = ledger.total(axis=axis.name, layer="gradients")[0] > 0
    return averaged and (axis.name == "data" or ledger.total(axis=axis.name, phase="forward")[0] > 0)


def _sane(name: str, good: bool, note: str) -> Check:
    return Check("sanity", name, 0.0 if good else math.inf, 0.0, note)


def bound_of(model: nn.Module, setting: Setting) -> float:
    """Sums are over tokens (weights' gradients, softmax) or features (products), module after module."""
    tokens = max(setting.batch["labels"].numel(), *(part[..., 0].numel() for part in setting.inputs.values()))
    features = max((max(weight.shape, default=1) for weight in model.parameters()), default=1)
    depth = sum(1 for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    return rounding_bound(setting.dtype, tokens + features) * max(1, depth)


def worst_of_ranks(checks: list[Check], context: SequenceContext, device: torch.device) -> list[Check]:
    """The same checks with the largest error of any rank; NaN is larger than all."""
    own = torch.tensor([check.error for check in checks], dtype=torch.float64, device=device)
    worst = context.gather_from_ranks(own.nan_to_num(nan=math.inf, posinf=math.inf)).amax(0).tolist()
    return [replace(check, error=error) for check, error in zip(checks, worst, strict=True)]
