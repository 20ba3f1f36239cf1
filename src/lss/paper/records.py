"""One figure of the paper beside the plan's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Quantity:
    """What a figure is of.

    Args:
        name: In a column's head.
        digits: Behind the point.
        compared: How the plan deviates: as a `ratio`, in `points` of percent, or `not` at all.
    """

    name: str
    digits: int
    compared: str


QUANTITIES = {
    "gigabytes": Quantity("GB a GPU", 2, "ratio"),
    "fits": Quantity("fits", 0, "not"),
    "attention": Quantity("attention ×", 1, "ratio"),
    "length_ratio": Quantity("length ×", 1, "not"),
    "step_ms": Quantity("step, ms", 0, "not"),
    "tflops": Quantity("TFLOP/s", 0, "not"),
    "tflops_ratio": Quantity("FLOP/s ×", 1, "ratio"),
    "efficiency_stated": Quantity("as stated %", 0, "not"),
    "efficiency_of_flops": Quantity("by FLOP/s %", 0, "not"),
    "efficiency_of_time": Quantity("by seconds %", 0, "not"),
    "efficiency_at_864": Quantity("efficiency %", 1, "points"),
    "longest": Quantity("tokens", 0, "ratio"),
    "computation": Quantity("computation %", 1, "points"),
    "communication": Quantity("communication %", 1, "points"),
    "waiting": Quantity("waiting %", 1, "points"),
    "collectives": Quantity("collectives a layer", 0, "ratio"),
    "times_faster": Quantity("times faster", 1, "ratio"),
    "times_smaller": Quantity("times less memory", 1, "ratio"),
    "utilisation": Quantity("GPU utilisation %", 0, "not"),
    "computing": Quantity("in operators %", 0, "not"),
    "computing_or_sending": Quantity("in operators and messages %", 0, "not"),
}


@dataclass(frozen=True)
class Record:
    """One figure of the paper beside the plan's.

    Args:
        section: Where in the paper, such as `3a`.
        run: Which run, in words that are the same for all figures of it.
        quantity: A key of `QUANTITIES`.
        paper: The paper's figure; None if it gives none.
        plan: The plan's; None if it has none.
        gpus: Of the run, on all sequence groups together.
        length: Tokens of a sequence; 0 where the plan is asked for it.
    """

    section: str
    run: str
    quantity: str
    paper: float | bool | None
    plan: float | bool | None
    gpus: int
    length: int

    @property
    def deviation(self) -> float | None:
        """Of the plan: 0.1 for 10 % above the paper, or points of percent."""
        compared = QUANTITIES[self.quantity].compared
        if self.paper is None or self.plan is None or compared == "not":
            return None
        return self.plan - self.paper if compared == "points" else self.plan / self.paper - 1

    def number(self, which: str) -> float:
        """Its `paper` or `plan`, not a number where there is none."""
        value = getattr(self, which)
        return math.nan if value is None else float(value)

    def to_dict(self) -> dict[str, Any]:
        """As a row of JSON."""
        return {**vars(self), "deviation": self.deviation, "deviates_by": QUANTITIES[self.quantity].compared}

    def cell(self, which: str) -> str:
        """Its text in a table: `paper`, `plan` or `deviation`."""
        value = getattr(self, which)
        if value is None:
            return "–"
        digits = QUANTITIES[self.quantity].digits
        if which != "deviation":
            return f"{value:,.{digits}f}"
        if QUANTITIES[self.quantity].compared == "points":
            return f"{value:+.1f} points"
        return f"{100 * value:+.1f} %"
