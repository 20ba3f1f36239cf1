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

# Share of the first's time that a plan which is left out takes at least.
NEAR = 0.99
# Seconds after which the best plan so far is taken.
PATIENCE = 48.0
# Bounds of what is planned before all else: runs of each degree, and what takes least memory where these do not fit.
FIRST, SECOND = -2.0, -1.0


def best(setup: Setup, hardware: Hardware, what_if: WhatIf, console: Console) -> Best:
    """The fastest ways to run as many sequences a step over as many ranks.

    All degrees are planned first. Keys and values gathered apart, again or in chunks may hide messages; layers computed
    again and parameters cut over the ranks are planned where a run does not fit without them. A run takes no less time
    than the one it comes of computes: so they are planned in this order, until ten fit and no other can be more than
    1 % faster than the first of these, or for some 50 seconds.

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
        search.add(FIRST, start)
    deadline = time.monotonic() + PATIENCE
    with _Planner(hardware, what_if, console) as planner:
        while not search.is_settled and (asked := search.next(planner.at_once)):
            search.take(planner.plan(asked))
            if time.monotonic() > deadline and search.has_begun:
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
            fits = outcome.peak.total <= self.memory
            for other in (smaller_attention if fits else smaller)(outcome.setup):
                self.add(outcome.timeline.computation, other)
            if fits:
                self.fitting.append(outcome)
            else:
                self._miss(outcome.setup)

    def _miss(self, setup: Setup) -> None:
        """A run does not fit: the smallest of its family tells whether any can."""
        least = smallest(setup)
        if setup == least:
            self._hopeless.add(family(setup))
        self.add(SECOND, least)

    @property
    def has_begun(self) -> bool:
        """Whether all degrees were looked at."""
        return not self.waiting or self.waiting[0][0] > FIRST

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
        batch = sequences // groups
        accumulation = min(batch, config.train.accumulation)
        train = replace(config.train, batch=batch, accumulation=accumulation, recompute=False)
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
    yield from smaller_attention(setup)


def smaller_attention(setup: Setup) -> Iterator[Setup]:
    """The same of what is gathered: chunks and what is gathered again may hide messages better, too."""
    config = setup.config
    if config.parallel.sequence == 1:
        return
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
