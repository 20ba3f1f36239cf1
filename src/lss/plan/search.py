"""Searching plans: the longest sequence that fits, and the fastest way to run one."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lss.attention import Gather
from lss.config import AttentionConfig, Config
from lss.errors import ConfigError, LssError
from lss.plan.hardware import Hardware
from lss.plan.plan import make_plan
from lss.plan.report import gigabytes, to_dict
from lss.plan.result import Plan, WhatIf
from lss.plan.setup import Setup

# Lengths are found to within this share.
PRECISION = 0.005
LONGEST = 2**40
SHOWN = 10
# What is tried; keys and values apart are as many bytes as packed, in twice the messages.
GATHERED: tuple[Gather, ...] = ("x", "kv")


def longest(setup: Setup, hardware: Hardware, what_if: WhatIf, memory: float, console: Console) -> Plan:
    """The plan of the longest sequence that fits, a multiple of the ranks that hold it.

    Args:
        setup: The run; its length is where the search begins.
        hardware: The machine.
        what_if: As of `make_plan`.
        memory: Bytes of a rank.
        console: Where the search is told.

    Raises:
        ConfigError: Not even one token a rank fits.
    """
    step = setup.config.parallel.sequence

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
    while too_long is None and start * 2 <= LONGEST:
        start *= 2
        plan = planned(start)
        fits, too_long = (plan, None) if plan.peak.total <= memory else (fits, plan)
    return fits, too_long


def _between(low: int, high: int, at_low: float, at_high: float, memory: float) -> int:
    """Where a straight line crosses the memory, well inside of both ends."""
    share = (memory - at_low) / max(1.0, at_high - at_low)
    width = high - low
    return low + min(max(round(width * share), 1, width // 16), width - max(1, width // 16))


@dataclass(frozen=True)
class Best:
    """What a search has found.

    Args:
        plans: Those that fit, fastest first.
        num_candidates: Ways to run it.
        num_planned: Those of them that were planned.
        too_large: Of these, the ones that do not fit.
        refused: Messages of those that cannot be run, and how often.
        memory: Bytes of a rank.
    """

    plans: list[Plan]
    num_candidates: int
    num_planned: int
    too_large: int
    refused: Counter[str]
    memory: float

    def show(self, console: Console) -> None:
        """Print the ten best, why the first wins, and the command that runs it."""
        table = Table("", "data x sequence", "batch", "gather", "kept", "recompute", "shard", "GB", "s / step", "comm")
        for number, plan in enumerate(self.plans[:SHOWN], 1):
            config = plan.setup.config
            table.add_row(
                str(number),
                f"{config.parallel.data} x {config.parallel.sequence}",
                str(config.train.batch),
                config.attention.gather,
                kept(plan),
                "yes" if config.train.recompute else "",
                "yes" if config.parallel.shard_parameters else "",
                f"{plan.peak.total / 1e9:.2f}",
                f"{plan.timeline.total:.4f}",
                f"{plan.communication_share:.0%}",
            )
        console.print(table)
        console.print(
            f"{self.num_candidates} candidates, {self.num_planned} planned, the others no faster than one that fits; "
            f"{len(self.plans)} fit into {gigabytes(self.memory)}, "
            f"{self.too_large} do not, {sum(self.refused.values())} cannot be run"
        )
        for message, number in self.refused.items():
            console.print(f"  {number} x {message}")
        console.print(self.why())
        console.print(command_of(self.plans[0]), style="bold", soft_wrap=True)

    def why(self) -> str:
        """What the first has over the second, and over the first of other degrees."""
        first, *others = self.plans
        said = [f"the first takes {first.timeline.total:.4f} s"]
        parallel = first.setup.config.parallel
        elsewhere = [plan for plan in others if plan.setup.config.parallel.sequence != parallel.sequence]
        for name, rivals in (("the second", others), ("the best of other degrees", elsewhere)):
            if rivals:
                said.append(f"{name} {_difference(first, rivals[0])}")
        return "; ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "num_candidates": self.num_candidates,
            "num_planned": self.num_planned,
            "num_fitting": len(self.plans),
            "best": [to_dict(plan, None) for plan in self.plans[:SHOWN]],
            "why": self.why(),
            "command": command_of(self.plans[0]),
        }


def _difference(first: Plan, other: Plan) -> str:
    """Where another plan loses its time."""
    config, line, best = other.setup.config, other.timeline, first.timeline
    parts = {
        "computation": line.computation - best.computation,
        "communication": line.communication - best.communication,
        "waiting": line.waiting - best.waiting,
    }
    told = ", ".join(
        f"{seconds:+.4f} s of {name}" for name, seconds in parts.items() if abs(seconds) > 1e-3 * best.total
    )
    what = f"{config.parallel.data} x {config.parallel.sequence}, {config.attention.gather}, {kept(other)}"
    return f"({what}) {told or 'takes as long'}"


def kept(plan: Plan) -> str:
    """What becomes of gathered tensors."""
    attention = plan.setup.config.attention
    if attention.chunks > 1:
        return f"{attention.chunks} chunks"
    return "kept" if attention.keep else "gathered again"


def best(setup: Setup, hardware: Hardware, what_if: WhatIf, memory: float, console: Console) -> Best:
    """The fastest ways to run as many sequences a step over as many ranks.

    Recomputing layers and cutting parameters over ranks make no plan faster: they are planned where one does not fit
    without them, and would be among the best if it did.

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
    plain = list(candidates(setup))
    with _Planner(hardware, what_if, console) as planner:
        found = planner.plan(plain)
        large = sorted(_plans(found, lambda size: size > memory), key=_seconds, reverse=True)
        while large and _seconds(large[-1]) < _bound(found, memory):
            tried, large = large[-_AT_ONCE:], large[:-_AT_ONCE]
            found += planner.plan([other for plan in tried for other in smaller(plan.setup)])
    plans = _plans(found, lambda size: True)
    refused = Counter(outcome for outcome in found if isinstance(outcome, str))
    fitting = sorted(_plans(found, lambda size: size <= memory), key=_seconds)
    if not fitting:
        raise _nothing_fits(plans, refused, memory)
    number = sum(1 + len(list(smaller(candidate))) for candidate in plain)
    return Best(fitting, number, len(found), len(plans) - len(fitting), refused, memory)


def _nothing_fits(plans: list[Plan], refused: Counter[str], memory: float) -> ConfigError:
    if not plans:
        return ConfigError(f"no way to run it: {next(iter(refused))}")
    least = min(plans, key=lambda plan: plan.peak.total)
    return ConfigError(
        f"no way to run it fits into {gigabytes(memory)}: the least takes {gigabytes(least.peak.total)}",
        allowed="more ranks, a shorter sequence, a smaller batch or a smaller model",
    )


# Plans that do not fit whose smaller forms are planned together.
_AT_ONCE = 4


def _plans(found: list[Plan | str], wanted: Callable[[int], bool]) -> list[Plan]:
    """Those whose bytes at peak are wanted."""
    return [plan for plan in found if isinstance(plan, Plan) and wanted(plan.peak.total)]


def _seconds(plan: Plan) -> float:
    return plan.timeline.total


def _bound(found: list[Plan | str], memory: float) -> float:
    """Seconds of the last plan that would be shown."""
    quick = sorted(map(_seconds, _plans(found, lambda size: size <= memory)))
    return quick[SHOWN - 1] if len(quick) >= SHOWN else math.inf


class _Planner:
    """All cores of this machine, each working out plans."""

    def __init__(self, hardware: Hardware, what_if: WhatIf, console: Console) -> None:
        context = multiprocessing.get_context("forkserver")  # no thread is ever forked
        context.set_forkserver_preload(["lss.plan"])
        self.pool = ProcessPoolExecutor(os.cpu_count() or 1, context)
        self.how = hardware, what_if
        self.progress = Progress(console=console, transient=True)
        self.task = self.progress.add_task("planning", total=0)

    def __enter__(self) -> _Planner:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        self.pool.shutdown(cancel_futures=True)

    def plan(self, asked: list[Setup]) -> list[Plan | str]:
        """Plans, or why there are none."""
        known = self.progress.tasks[0].total or 0
        self.progress.update(self.task, total=known + len(asked))
        found = []
        for outcome in self.pool.map(_attempt, asked, *([part] * len(asked) for part in self.how)):
            found.append(outcome)
            self.progress.advance(self.task)
        return found


def _attempt(setup: Setup, hardware: Hardware, what_if: WhatIf) -> Plan | str:
    """A plan, or why there is none."""
    try:
        return make_plan(setup, hardware, what_if)
    except LssError as error:
        return str(error).splitlines()[0]


def candidates(setup: Setup) -> Iterator[Setup]:
    """Ways to run the same sequences over the same ranks: degrees, what is gathered, and what becomes of it."""
    config, ranks = setup.config, setup.num_ranks
    sequences = config.train.batch * config.parallel.data
    for groups in range(1, ranks + 1):
        if ranks % groups or sequences % groups or ranks // groups > config.data.length:
            continue
        parallel = replace(config.parallel, sequence=ranks // groups, data=groups, shard_parameters=False)
        train = replace(config.train, batch=sequences // groups, recompute=False)
        for attention in _attentions(config.attention) if groups < ranks else [config.attention]:
            yield replace(setup, config=replace(config, attention=attention, parallel=parallel, train=train))


def _attentions(attention: AttentionConfig) -> Iterator[AttentionConfig]:
    for gather in GATHERED:
        for keep, chunks in ((True, 1), (False, 1), (False, 2), (False, 4)):
            yield replace(attention, gather=gather, keep=keep, chunks=chunks)


def smaller(setup: Setup) -> Iterator[Setup]:
    """The same in less memory and more time."""
    config = setup.config
    for recompute, shard in ((True, False), (False, True), (True, True)):
        if shard and setup.num_ranks == 1:
            continue
        train, parallel = replace(config.train, recompute=recompute), replace(config.parallel, shard_parameters=shard)
        yield replace(setup, config=replace(config, train=train, parallel=parallel))


def command_of(plan: Plan) -> str:
    """What runs a plan."""
    setup, config = plan.setup, plan.setup.config
    parallel, ranks = config.parallel, setup.num_ranks
    if setup.target:
        told = ", ".join(f"{name}={value!r}" for name, value in asdict(config.attention).items())
        extra = "; fully_shard it over all ranks" if parallel.shard_parameters else ""
        extra += "; checkpoint its layers" if config.train.recompute else ""
        mesh = f"mesh = lss.init_mesh(sequence={parallel.sequence}, data={parallel.data})"
        return f"{mesh}; model = lss.parallelize(model, mesh, {told}){extra}"
    node = min(ranks, plan.hardware.ranks_per_node)
    start = f"torchrun --nnodes {math.ceil(ranks / node)} --nproc-per-node {node} -m lss" if ranks > 1 else "lss"
    return " ".join([start, "train", *_flags(config)])


def _flags(config: Config) -> Iterator[str]:
    """What is not as by default."""
    given, usual = asdict(config), asdict(Config())
    for section, keys in given.items():
        for key, value in keys.items():
            if value != usual[section][key]:
                yield f"--{section}.{key} {str(value).lower() if isinstance(value, bool) else value}"
