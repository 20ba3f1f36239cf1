"""The longest sequence that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from lss.errors import ConfigError
from lss.plan.hardware import Hardware
from lss.plan.plan import make_plan
from lss.plan.report import gigabytes
from lss.plan.result import Plan, WhatIf
from lss.plan.setup import Setup

# Lengths are found to within this share, and looked for up to this one.
PRECISION = 0.005
LONGEST = 2**26


def longest(setup: Setup, hardware: Hardware, what_if: WhatIf, console: Console) -> Plan:
    """The plan of the longest sequence that fits, a multiple of the ranks that hold it.

    Args:
        setup: The run; its length is where the search begins.
        hardware: The machine.
        what_if: As of `make_plan`.
        console: Where the search is told.

    Raises:
        ConfigError: Not even one token a rank fits.
    """
    step, memory = setup.config.parallel.sequence, hardware.memory

    def planned(number: int) -> Plan:
        length = number * step
        console.print(f"  {length:,} tokens", end="")
        config = replace(setup.config, data=replace(setup.config.data, length=length))
        plan = make_plan(replace(setup, config=config), hardware, what_if)
        console.print(f": {gigabytes(plan.peak.total)}")
        return plan

    fits, too_long = _bracket(planned, max(1, setup.config.data.length // step), memory)
    while too_long is not None:
        low, high = (plan.setup.config.data.length // step for plan in (fits, too_long))
        if high - low <= max(1, PRECISION * low):
            break
        middle = planned(_between(low, high, fits.peak.total, too_long.peak.total, memory))
        fits, too_long = (middle, too_long) if middle.peak.total <= memory else (fits, middle)
    return fits


def _bracket(planned: Any, start: int, memory: float) -> tuple[Plan, Plan | None]:
    """A plan that fits, and a longer one that does not; None where none is too long."""
    plan = planned(start)
    fits, too_long = (plan, None) if plan.peak.total <= memory else (None, plan)
    while fits is None:
        if start == 1:
            raise ConfigError(
                f"{gigabytes(plan.peak.total)} for one token a rank, of {gigabytes(memory)}",
                allowed="a model whose parameters and optimizer states fit",
                remedy="--shard-parameters, or a smaller model",
            )
        start = max(1, start // 4)
        plan = planned(start)
        fits, too_long = (plan, too_long) if plan.peak.total <= memory else (None, plan)
    while too_long is None and plan.setup.config.data.length * 2 <= LONGEST:
        start *= 2
        plan = planned(start)
        fits, too_long = (plan, None) if plan.peak.total <= memory else (fits, plan)
    return fits, too_long


def _between(low: int, high: int, at_low: float, at_high: float, memory: float) -> int:
    """Where a straight line crosses the memory, well inside of both ends."""
    share = (memory - at_low) / max(1.0, at_high - at_low)
    width = high - low
    return low + min(max(round(width * share), 1, width // 16), width - max(1, width // 16))
