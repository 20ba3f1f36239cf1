"""A step played on a machine: when the device computes, when it waits for messages, when for slower ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

from lss.ledger import Entry
from lss.plan.hardware import Hardware
from lss.plan.trace import Event, Operator, Start

# Seconds of a collective over an axis: operation, bytes, axis.
SecondsOf = Callable[[Entry, int], float]


@dataclass
class Timeline:
    """Seconds of a step.

    Args:
        computation: In which the device or, where it has nothing to do, the host was at work.
        communication: In which the device stood still because of a message: what overlap did not hide.
        waiting: In which it stood still because another rank was slower.
        in_messages: Of all collectives, hidden or not, by entry.
    """

    computation: float = 0.0
    communication: float = 0.0
    waiting: float = 0.0
    in_messages: dict[Entry, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.computation + self.communication + self.waiting


@dataclass(frozen=True)
class Message:
    """A collective that is on its way.

    Args:
        begun: When this rank had its part ready.
        seconds: That it takes once all ranks are there.
        late: Seconds by which the slowest rank comes later.
        free: When the axis was free for it.
    """

    begun: float
    seconds: float
    late: float
    free: float


@dataclass
class _Player:
    """Clocks of one rank."""

    hardware: Hardware
    seconds_of: SecondsOf
    lateness: float  # of the slowest rank, as a share of what is computed between two collectives
    host: float = 0.0
    device: float = 0.0
    computed: float = 0.0  # since the last collective
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[Entry, deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    line: Timeline = field(default_factory=Timeline)

    def compute(self, operator: Operator) -> None:
        seconds = self.hardware.seconds(operator)
        self.host += self.hardware.rates.operator
        if self.hardware.device == "cpu":  # host and device are one
            self.host = self.device = max(self.host, self.device + self.hardware.rates.operator) + seconds
            spent = seconds + self.hardware.rates.operator
        else:
            before, self.device = self.device, max(self.device, self.host) + seconds
            spent = self.device - before
        self.line.computation += spent
        self.computed += spent

    def start(self, event: Start) -> None:
        seconds = self.seconds_of(event.entry, event.num_bytes)
        late, self.computed = self.lateness * self.computed, 0.0
        axis = event.entry.axis
        message = Message(self.device, seconds, late, self.free[axis])
        self.free[axis] = max(self.device + late, message.free) + seconds
        self.sent[event.entry].append(message)
        self.line.in_messages[event.entry] += seconds

    def wait(self, entry: Entry) -> None:
        message = self.sent[entry].popleft()
        behind = max(0.0, message.free - message.begun)  # other messages of the axis come first
        elapsed = self.device - message.begun
        left = max(0.0, behind + message.late + message.seconds - self.hardware.overlap * elapsed)
        late = min(left, message.late)
        self.line.waiting += late
        self.line.communication += left - late
        self.device += left
        self.host = max(self.host, self.device) if self.hardware.device == "cpu" else self.host


def play(events: list[Event], hardware: Hardware, seconds_of: SecondsOf, num_ranks: int, straggler: float) -> Timeline:
    """Play a step.

    Args:
        events: Of the busiest rank.
        hardware: The machine.
        seconds_of: Seconds of a collective.
        num_ranks: That wait for each other.
        straggler: How many times longer the slowest rank takes for the same work; 1 for no such rank.
    """
    player = _Player(hardware, seconds_of, hardware.jitter * expected_largest(num_ranks) + straggler - 1)
    for event in events:
        if isinstance(event, Operator):
            player.compute(event)
        elif isinstance(event, Start):
            player.start(event)
        else:
            player.wait(event.entry)
    return player.line


def expected_largest(number: int) -> float:
    """Mean of the largest of so many standard normal values (Blom's approximation)."""
    if number < 2:
        return 0.0
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))
