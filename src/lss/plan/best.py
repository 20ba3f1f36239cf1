"""The fastest way to run a model that fits, by best-first search."""

from __future__ import annotations

import heapq
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress

from lss.config import AttentionConfig
from lss.errors import ConfigError, LssError
from lss.plan.choice import SHOWN, Best
from lss.plan.hardware import Hardware
from lss.plan.plan import make_plan
from lss.plan.processes import all_cores
from lss.plan.report import gigabytes
from lss.plan.result import Plan, WhatIf
from lss.plan.setup import Setup

# How near a plan that is left out may come to the first.
NEAR = 1.01
# Share of its time that a run takes at least when it is changed to take less memory: chunks hide messages better.
GAIN = 0.97
# Seconds after which the best plan so far is taken.
PATIENCE = 48.0


def best(setup: Setup, hardware: Hardware, what_if: WhatIf, console: Console) -> Best:
    """The fastest ways to run as many sequences a step over as many ranks.

    What takes less memory takes hardly less time: keys and values gathered apart, again or in chunks, layers computed
    again, parameters cut over the ranks. So these are planned where a run does not fit without them, the fastest first,
    until ten fit and no other can come within 1 % of the first of these, or for some 40 seconds.

    Args:
        setup: The run; its data groups and batch say how many sequences a step has.
        hardware: The machine.
        what_if: As of `make_plan`.
        console: Where the search is told.

    Raises:
        ConfigError: Nothing fits.
    """
    search = _Search(hardware.memory)
    starts = list(degrees(setup))
    for start in starts:
        search.add(0.0, start)
    deadline = time.monotonic() + PATIENCE
    with _Planner(hardware, what_if, console) as planner:
        while not search.is_settled and (asked := search.next(planner.at_once)):
            search.take(planner.plan(asked))
            if time.monotonic() > deadline:
                break
    number = sum(len(reachable(start)) for start in starts)
    if not search.fitting:
        raise search.failure(number, planner.number)
    fitting = sorted(search.fitting, key=lambda plan: plan.timeline.total)
    return Best(fitting, number, planner.number, search.is_settled, search.refused, search.memory)


# Data groups, and what is gathered: runs that differ in what takes less memory alone.
Family = tuple[int, bool]


class _Search:
    """What is known, and what is to be planned, the fastest first."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.fitting: list[Plan] = []
        self.refused: Counter[str] = Counter()
        self.least = math.inf
        self.waiting: list[tuple[float, int, Setup]] = []
        self._known: set[Setup] = set()
        self._hopeless: set[Family] = set()

    def add(self, bound: float, setup: Setup) -> None:
        """Have a run planned, which takes at least so many seconds."""
        if setup not in self._known:
            self._known.add(setup)
            heapq.heappush(self.waiting, (bound, len(self._known), setup))

    def next(self, number: int) -> list[Setup]:
        """The next ones to be planned."""
        found: list[Setup] = []
        while self.waiting and len(found) < number:
            _, _, setup = heapq.heappop(self.waiting)
            if family(setup) not in self._hopeless:
                found.append(setup)
        return found

    def take(self, outcomes: list[Plan | str]) -> None:
        """Take in plans, or why there are none."""
        for outcome in outcomes:
            if isinstance(outcome, str):
                self.refused[outcome] += 1
                continue
            self.least = min(self.least, outcome.peak.total)
            if outcome.peak.total <= self.memory:
                self.fitting.append(outcome)
                continue
            for other in smaller(outcome.setup):
                self.add(GAIN * outcome.timeline.total, other)
            self._miss(outcome.setup)

    def _miss(self, setup: Setup) -> None:
        """A run does not fit: the smallest of its family tells whether any can."""
        least = smallest(setup)
        if setup == least:
            self._hopeless.add(family(setup))
        self.add(0.0, least)

    @property
    def is_settled(self) -> bool:
        """Whether enough plans fit, and nothing that is left comes near the first."""
        bound = self.waiting[0][0] if self.waiting else math.inf
        enough = len(self.fitting) >= SHOWN or not self.waiting
        fastest = min((plan.timeline.total for plan in self.fitting), default=None)
        return fastest is not None and enough and NEAR * fastest <= bound

    def failure(self, number: int, planned: int) -> ConfigError:
        """Nothing fits, of so many ways of which so many were planned."""
        if self.least == math.inf:
            return ConfigError(f"no way to run it: {next(iter(self.refused))}")
        tried = f", of {planned} that were tried of {number}" if self.waiting else ""
        return ConfigError(
            f"no way to run it fits into {gigabytes(self.memory)}: the least{tried} takes {gigabytes(self.least)}",
            allowed="more ranks, a shorter sequence, a smaller batch or a smaller model",
        )


class _Planner:
    """All cores of this machine, each working out plans."""

    def __init__(self, hardware: Hardware, what_if: WhatIf, console: Console) -> None:
        self.at_once, self.number = os.cpu_count() or 1, 0
        self.pool = all_cores()
        self.how = hardware, what_if
        self.progress = Progress("{task.description} {task.completed}", console=console, transient=True)
        self.task = self.progress.add_task("plans", total=None)

    def __enter__(self) -> _Planner:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        self.pool.shutdown(cancel_futures=True)

    def plan(self, asked: list[Setup]) -> list[Plan | str]:
        """Plans, or why there are none."""
        found = list(self.pool.map(_attempt, asked, *([part] * len(asked) for part in self.how)))
        self.number += len(asked)
        self.progress.advance(self.task, len(asked))
        return found


def _attempt(setup: Setup, hardware: Hardware, what_if: WhatIf) -> Plan | str:
    """A plan, or why there is none."""
    try:
        return make_plan(setup, hardware, what_if)
    except LssError as error:
        return str(error).splitlines()[0]


def degrees(setup: Setup) -> Iterator[Setup]:
    """The same sequences over the same ranks, in each number of data groups, with either thing gathered and kept."""
    config, ranks = setup.config, setup.num_ranks
    sequences = config.train.batch * config.parallel.data
    for groups in range(1, ranks + 1):
        if ranks % groups or sequences % groups or ranks // groups > config.data.length:
            continue
        parallel = replace(config.parallel, sequence=ranks // groups, data=groups, shard_parameters=False)
        train = replace(config.train, batch=sequences // groups, recompute=False)
        attention = replace(config.attention, keep=True, chunks=1)
        for one in [replace(attention, gather=gather) for gather in ("x", "kv")] if groups < ranks else [attention]:
            yield replace(setup, config=replace(config, attention=one, parallel=parallel, train=train))


def family(setup: Setup) -> Family:
    """Which `smaller` and `smallest` stay in."""
    return setup.config.parallel.data, setup.config.attention.gather == "x"


def smallest(setup: Setup) -> Setup:
    """What takes the least memory with its degrees."""
    config = setup.config
    attention, several = config.attention, setup.num_ranks > 1
    if config.parallel.sequence > 1:
        attention = replace(attention, gather="x" if attention.gather == "x" else "separate", keep=False, chunks=4)
    train, parallel = replace(config.train, recompute=True), replace(config.parallel, shard_parameters=several)
    return replace(setup, config=replace(config, attention=attention, train=train, parallel=parallel))


def smaller(setup: Setup) -> Iterator[Setup]:
    """What takes less memory by one thing more."""
    config = setup.config
    if not config.train.recompute:
        yield replace(setup, config=replace(config, train=replace(config.train, recompute=True)))
    if not config.parallel.shard_parameters and setup.num_ranks > 1:
        yield replace(setup, config=replace(config, parallel=replace(config.parallel, shard_parameters=True)))
    if config.parallel.sequence > 1:
        for attention in _smaller_attention(config.attention):
            yield replace(setup, config=replace(config, attention=attention))


def _smaller_attention(attention: AttentionConfig) -> Iterator[AttentionConfig]:
    if attention.gather == "kv":
        yield replace(attention, gather="separate")
    if attention.keep:
        yield replace(attention, keep=False)
    elif attention.chunks < 4:
        yield replace(attention, chunks=2 * attention.chunks)


def reachable(start: Setup) -> set[Setup]:
    """A run and all that take less memory."""
    found, new = {start}, [start]
    while new:
        new = [other for setup in new for other in smaller(setup) if other not in found]
        found.update(new)
    return found
