"""A plan: what a step of a run takes on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from lss.ledger import Entry
from lss.plan.hardware import Algorithm, Hardware
from lss.plan.links import seconds
from lss.plan.memory import Peak, peak
from lss.plan.setup import Setup, trace_step
from lss.plan.timeline import Timeline, play
from lss.plan.trace import Start, Trace


@dataclass(frozen=True)
class WhatIf:
    """Changes to a run that are planned only.

    Args:
        hierarchical: All-gathers and reduce-scatters go between nodes first, then inside of them.
        overlap: Every message is hidden behind computation as far as there is any.
        compression: Times that messages of attention are smaller; not exact above 1.
        straggler: Times that the slowest rank takes longer.
    """

    hierarchical: bool = False
    overlap: bool = False
    compression: float = 1.0
    straggler: float = 1.0

    @property
    def is_exact(self) -> bool:
        """Whether such a run would equal the serial one."""
        return self.compression == 1.0


@dataclass(frozen=True)
class Message:
    """Collectives of one kind in a step.

    Args:
        axis: `sequence` or `data`; `all` for `shard_parameters`.
        operation: As of the ledger.
        phase: The same.
        count: How many.
        bytes: Sent by the rank, together.
        seconds: Together, hidden or not.
    """

    axis: str
    operation: str
    phase: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What a step takes, on its busiest rank.

    Args:
        setup: The run.
        hardware: The machine.
        peak: Memory.
        flops: Operations of the rank.
        messages: What it sends.
        timeline: Its seconds.
        what_if: What was changed.
    """

    setup: Setup
    hardware: Hardware
    peak: Peak
    flops: int
    messages: tuple[Message, ...]
    timeline: Timeline
    what_if: WhatIf

    @property
    def fits(self) -> bool:
        """Whether the memory of a rank is enough."""
        return self.peak.total <= self.hardware.memory

    @property
    def flops_per_second(self) -> float:
        """Of all ranks, as if all were as busy as this one."""
        return self.flops * self.setup.num_ranks / self.timeline.total

    @property
    def utilisation(self) -> float:
        """Share of the peak rate of matrix products."""
        rate = self.hardware.peak_rate(self.setup.config.train.precision)
        return self.flops / self.timeline.total / rate

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        config = self.setup.config
        return config.train.batch * config.parallel.data * config.data.length / self.timeline.total

    @property
    def communication_share(self) -> float:
        """Of the step's seconds."""
        return self.timeline.communication / self.timeline.total


EXACTLY = WhatIf()


def make_plan(setup: Setup, hardware: Hardware, what_if: WhatIf = EXACTLY) -> Plan:
    """Plan one step of a run.

    Raises:
        LssError: The run would be refused, or the target fails.
    """
    trace = traced(setup)
    machine = hardware
    if what_if.hierarchical:
        by_nodes: dict[str, Algorithm] = {"all_gather": "hierarchical", "reduce_scatter": "hierarchical"}
        machine = replace(hardware, collectives={**hardware.collectives, **by_nodes})

    def seconds_of(entry: Entry, num_bytes: int) -> float:
        is_of_attention = entry.phase in ("forward", "backward")
        sent = num_bytes / what_if.compression if is_of_attention else num_bytes
        return seconds(machine, entry.operation, sent, setup.group(entry.axis, machine.ranks_per_node))

    line = play(trace.events, machine, seconds_of, setup.num_ranks, what_if.straggler)
    if what_if.overlap:
        line.communication = max(0.0, sum(line.in_messages.values()) - line.computation)
    return Plan(setup, hardware, peak(trace), trace.flops, _messages(trace, line), line, what_if)


@lru_cache(maxsize=64)
def traced(setup: Setup) -> Trace:
    """The step of a run: kept, as it depends on no rates."""
    return trace_step(setup)


def _messages(trace: Trace, line: Timeline) -> tuple[Message, ...]:
    found: dict[tuple[str, str, str], Message] = {}
    for event in trace.events:
        if isinstance(event, Start):
            key = event.entry.axis, event.entry.operation, event.entry.phase
            before = found.get(key, Message(*key, 0, 0, 0.0))
            found[key] = replace(before, count=before.count + 1, bytes=before.bytes + event.num_bytes)
    for entry, spent in line.in_messages.items():
        key = entry.axis, entry.operation, entry.phase
        found[key] = replace(found[key], seconds=found[key].seconds + spent)
    return tuple(found.values())
