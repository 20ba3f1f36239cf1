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
    """The moment at which most memory is held.

    Args:
        bytes: Of each kind: `parameters` (and buffers), `gradients`, `optimizer` states, `activations` that forward
            keeps for backward, what was `gathered` from other ranks, and `workspace`, which is all else.
        phase: `forward`, `early backward`, `middle of backward`, `late backward` or `update`.
    """

    bytes: dict[str, int]
    phase: str

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.bytes.values())


def peaks(trace: Trace) -> list[Peak]:
    """Of each phase of a step that holds memory."""
    changes: Counter[int] = Counter()
    for allocation in trace.allocations:
        changes[allocation.born] += allocation.size
        if allocation.died is not None:
            changes[allocation.died] -= allocation.size
    times = sorted(changes)
    held = list(accumulate(changes[time] for time in times))
    most: dict[str, tuple[int, int]] = {}
    for time, size in zip(times, held, strict=True):
        phase = _phase(time, trace)
        most[phase] = max(most.get(phase, (0, time)), (size, time))
    return [Peak(_bytes(time, trace), phase) for phase, (_, time) in most.items()]


def _bytes(when: int, trace: Trace) -> dict[str, int]:
    found = dict.fromkeys(KINDS, 0)
    for allocation in trace.allocations:
        if allocation.born <= when < (math.inf if allocation.died is None else allocation.died):
            found[_kind(allocation, trace)] += allocation.size
    return found


def _kind(allocation: Allocation, trace: Trace) -> str:
    if allocation.kind:
        return allocation.kind
    died = math.inf if allocation.died is None else allocation.died
    is_kept = any(allocation.born <= start < died for start, _ in trace.backwards)
    return "activations" if allocation.in_forward and is_kept else "workspace"


# Backward holds most while it is in the last layer, whose activations are all there, or in the first, when gradients
# are; in between it holds no more than at the one or at the other, as each layer frees and takes the same.
def _phase(when: int, trace: Trace) -> str:
    for number, (start, stop) in enumerate(trace.backwards):
        if start < when <= stop:
            last_over, first_begun = (
                marks[number] if number < len(marks) else stop for marks in (trace.last_over, trace.first_begun)
            )
            if when <= last_over:
                return "early backward"
            return "late backward" if when > first_begun else "middle of backward"
    return "forward" if when <= trace.backwards[-1][0] else "update"
