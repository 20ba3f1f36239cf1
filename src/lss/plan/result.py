"""A plan: what a step of a run takes on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from lss.plan.hardware import Hardware
from lss.plan.memory import Peak
from lss.plan.setup import Setup
from lss.plan.timeline import Timeline


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
        peaks: Memory, in each phase.
        flops: Operations of the rank.
        messages: What it sends.
        timeline: Its seconds.
        what_if: What was changed.
    """

    setup: Setup
    hardware: Hardware
    peaks: tuple[Peak, ...]
    flops: int
    messages: tuple[Message, ...]
    timeline: Timeline
    what_if: WhatIf

    @property
    def peak(self) -> Peak:
        """The phase in which most is held."""
        return max(self.peaks, key=lambda peak: peak.total)

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
