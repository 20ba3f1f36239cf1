"""Checks, their bounds, and the report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

# Gradients this much smaller than the model's largest are compared on the scale of this share of it: what is left of a
# sum that cancels (a key's bias, say) is rounding.
SMALL = 1e-3


@dataclass(frozen=True)
class Check:
    """One quantity, compared.

    Args:
        kind: `loss`, `output`, `gradient`, `norm`, `parameter`, `dropout`, `replicas` or `sanity`.
        name: Of the parameter, or what was looked at.
        error: Largest relative error over all ranks; infinite where shapes differ or something is not finite.
        bound: What rounding can explain.
        note: What a failure means.
    """

    kind: str
    name: str
    error: float
    bound: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound

    @property
    def excess(self) -> float:
        """Error over bound; infinite for NaN. The worst check has the largest."""
        ratio = self.error / self.bound if self.bound else (0.0 if self.error == 0 else float("inf"))
        return ratio if ratio == ratio else float("inf")


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Args:
        title: What was compared.
        checks: Worst first.
        first_forward: First module in order of execution whose output parts from the serial run's; empty if none.
        last_equal: The module before it, whose output is equal; empty if none.
        first_backward: First module, as backward reaches it, at whose output the gradient parts; empty if none.
        left_out: Outputs that were not compared, as they are not of tokens.
    """

    title: str
    checks: tuple[Check, ...]
    first_forward: str = ""
    last_equal: str = ""
    first_backward: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all checks hold."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `passed`, the fields, and `checks`, worst first; infinite errors are null."""
        return {
            "passed": self.passed,
            "title": self.title,
            "first_forward": self.first_forward,
            "last_equal": self.last_equal,
            "first_backward": self.first_backward,
            "left_out": list(self.left_out),
            "checks": [asdict(check) | {"error": _json(check.error), "passed": check.passed} for check in self.checks],
        }

    def render(self, limit: int = 12) -> RenderableType:
        """A table of the worst checks, and the verdict."""
        table = Table(
            "check", Column("of", overflow="fold"), "error", "bound", "verdict", title=self.title, title_justify="left"
        )
        for check in self.checks[:limit]:
            answer = Text("equal", "green") if check.passed else Text("DIFFERENT", "bold red")
            table.add_row(check.kind, check.name, f"{check.error:.1e}", f"{check.bound:.1e}", answer)
        lines: list[RenderableType] = [table]
        hidden = len(self.checks) - table.row_count
        if hidden:
            lines.append(Text(f"... and {hidden} more, none of them worse"))
        bad = [check for check in self.checks if not check.passed]
        gradients = any(check.kind == "gradient" for check in bad)  # which a wrong norm then follows from
        notes = [check for check in bad if check.note and not (gradients and check.kind == "norm")]
        lines.extend(Text(f"{check.kind} {check.name}: {check.note}") for check in notes)
        if self.first_forward:
            lines.append(Text(f"first module whose output differs: {self.first_forward}", "red"))
            if self.last_equal:
                lines.append(Text(f"the last one before it that is equal: {self.last_equal}"))
                lines.append(Text("look at the first, and at the code that runs between the two"))
        elif self.first_backward:
            lines.append(Text(f"first module, going backward, whose gradient differs: {self.first_backward}", "red"))
        if self.left_out:
            lines.append(Text(f"outputs not compared, as they are not [B, L, ...]: {', '.join(self.left_out)}"))
        counts = f"{len(self.checks) - len(bad)} of {len(self.checks)} checks hold"
        verdict = "NOT EQUAL" if bad else "EQUAL"
        lines.append(Text(f"{verdict} to the serial run: {counts}", "bold red" if bad else "bold green"))
        return Group(*lines)


def _json(error: float) -> float | None:
    return error if math.isfinite(error) else None  # JSON knows neither NaN nor infinity


def report(
    title: str, checks: Iterable[Check], names: tuple[str, str, str] = ("", "", ""), left_out: tuple[str, ...] = ()
) -> Report:
    """A report with the worst check first; names of modules, and outputs left out, as in `Report`."""
    ordered = sorted(checks, key=lambda check: check.excess, reverse=True)
    return Report(title, tuple(ordered), *names, left_out)


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest expected magnitude, which counts as `floor` at least; NaN spreads.

    Another shape, or no value where one is expected, is an infinite error.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    found, wanted = (torch.view_as_real(part) if part.is_complex() else part for part in (actual, expected))
    found, wanted = found.double(), wanted.double()
    difference = (found - wanted).masked_fill(found == wanted, 0.0).abs().max().item()  # equal infinities are equal
    scale = max(wanted.abs().masked_fill(wanted.isinf(), 0.0).max().item(), floor)
    if difference == 0:
        return 0.0
    return difference / scale if scale else float("inf")


def rounding_bound(dtype: torch.dtype, num_terms: int) -> float:
    """Relative error that rounding explains where sums of `num_terms` are taken in another order.

    The probabilistic bound lambda sqrt(terms) u of Higham and Mary (A New Approach to Probabilistic Rounding Error
    Analysis, 2019, theorem 2.4), with u half of epsilon and lambda 8, which fails once in about 1e13 sums.
    """
    return 8 * math.sqrt(num_terms) * torch.finfo(dtype).eps / 2
