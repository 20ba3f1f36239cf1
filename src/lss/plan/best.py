"""The fastest way to run a model that fits, by best-first search."""

from __future__ import annotations

import heapq
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import count

from rich.console import Console
from rich.progress import Progress

from lss.config import AttentionConfig
from lss.errors import ConfigError, LssError
from lss.plan.choice import SHOWN, Best
from lss.plan.hardware import Hardware
from lss.plan.plan import make_plan
from lss.plan.report import gigabytes
from lss.plan.result import Plan, WhatIf
from lss.plan.setup import Setup


# How near a plan that is left out may come to the first.
NEAR = 1.01


def best(setup: Setup, hardware: Hardware, what_if: WhatIf, memory: float, console: Console) -> Best:
    """The fastest ways to run as many sequences a step over as many ranks.

    What takes less memory takes no less time: keys and values gathered apart, again or in chunks, layers computed
    again, parameters cut over the ranks. So these are planned where a run does not fit without them, the fastest first,
    until ten fit and no other can come within 1 % of the first of these.

    Args:
        setup: The run; its data groups and batch say how many sequences a step has.
        hardware: The machine.
        what_if: As of `make_plan`.
        memory: Bytes of a rank; 0 for the machine's.
        console: Where the search is told.

    Raises:
        ConfigError: Nothing fits.
    """
    memory = memory or hardware.memory
    fitting: list[Plan] = []
    numbers, refused = count(), Counter[str]()
    least = float("inf")
    known = set(degrees(setup))
    waiting = [(0.0, next(numbers), candidate) for candidate in known]
    with _Planner(hardware, what_if, console) as planner:
        while waiting and not _is_settled(fitting, waiting[0][0]):
            tried = [heapq.heappop(waiting)[2] for _ in range(min(len(waiting), planner.at_once))]
            for outcome in planner.plan(tried):
                if isinstance(outcome, str):
                    refused[outcome] += 1
                    continue
                least = min(least, outcome.peak.total)
                if outcome.peak.total <= memory:
                    fitting.append(outcome)
                    continue
                for other in smaller(outcome.setup):
                    if other not in known:
                        known.add(other)
                        heapq.heappush(waiting, (outcome.timeline.total, next(numbers), other))
    if not fitting:
        raise _nothing_fits(refused, least, memory)
    fitting.sort(key=lambda plan: plan.timeline.total)
    return Best(fitting, sum(1 for start in degrees(setup) for _ in reachable(start)), planner.number, refused, memory)


def _is_settled(fitting: list[Plan], bound: float) -> bool:
    """Whether enough plans fit, and nothing that takes at least so many seconds comes near the first."""
    return len(fitting) >= SHOWN and NEAR * min(plan.timeline.total for plan in fitting) <= bound


def _nothing_fits(refused: Counter[str], least: float, memory: float) -> ConfigError:
    if least == float("inf"):
        return ConfigError(f"no way to run it: {next(iter(refused))}")
    return ConfigError(
        f"no way to run it fits into {gigabytes(memory)}: the least takes {gigabytes(least)}",
        allowed="more ranks, a shorter sequence, a smaller batch or a smaller model",
    )


class _Planner:
    """All cores of this machine, each working out plans."""

    def __init__(self, hardware: Hardware, what_if: WhatIf, console: Console) -> None:
        context = multiprocessing.get_context("forkserver")  # no thread is ever forked
        context.set_forkserver_preload(["lss.plan"])
        self.at_once, self.number = os.cpu_count() or 1, 0
        self.pool = ProcessPoolExecutor(self.at_once, context)
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
