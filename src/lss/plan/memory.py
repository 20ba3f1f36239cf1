"""Bytes at peak, by what they hold."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from lss.plan.trace import Allocation, Trace

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "workspace")


@dataclass(frozen=True)
class Peak:
    """The moment of a step at which most memory is held.

    Args:
        bytes: Of each kind: `parameters` (and buffers), `gradients`, `optimizer` states, `activations` that forward
            keeps for backward, what was `gathered` from other ranks, and `workspace`, which is all else.
        phase: `forward`, `backward` or `update`.
    """

    bytes: dict[str, int]
    phase: str

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.bytes.values())


def peak(trace: Trace) -> Peak:
    """Of a step."""
    changes: Counter[int] = Counter()
    for allocation in trace.allocations:
        changes[allocation.born] += allocation.size
        if allocation.died is not None:
            changes[allocation.died] -= allocation.size
    times = sorted(changes)
    held = list(accumulate(changes[time] for time in times))
    when = times[held.index(max(held))]
    found = dict.fromkeys(KINDS, 0)
    for allocation in trace.allocations:
        if allocation.born <= when and (allocation.died is None or allocation.died > when):
            found[_kind(allocation, trace)] += allocation.size
    return Peak(found, _phase(when, trace))


def _kind(allocation: Allocation, trace: Trace) -> str:
    if allocation.kind:
        return allocation.kind
    died = math.inf if allocation.died is None else allocation.died
    is_kept = any(allocation.born <= start < died for start, _ in trace.backwards)
    return "activations" if allocation.in_forward and is_kept else "workspace"


def _phase(when: int, trace: Trace) -> str:
    if any(start < when <= stop for start, stop in trace.backwards):
        return "backward"
    return "forward" if when < trace.backwards[-1][0] else "update"
