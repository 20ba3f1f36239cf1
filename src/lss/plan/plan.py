"""Planning one step of a run."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace
from functools import lru_cache

from lss.errors import LssError
from lss.ledger import Entry
from lss.plan.hardware import Algorithm, Hardware
from lss.plan.layers import FEW, extrapolated, num_like_layers, overlapped
from lss.plan.links import seconds
from lss.plan.memory import peaks
from lss.plan.result import Message, Plan, WhatIf
from lss.plan.setup import Setup, trace_step
from lss.plan.timeline import Timeline, play
from lss.plan.trace import Start, Trace

EXACTLY = WhatIf()
# Tokens of the longest sequence that is planned on one CPU rank, whose kernel cuts it into blocks of 512.
LONGEST_SERIAL = 2**15


def make_plan(setup: Setup, hardware: Hardware, what_if: WhatIf = EXACTLY, beside: Executor | None = None) -> Plan:
    """Plan one step of a run.

    Where all layers are alike, runs of two and of three of them tell what each layer more takes.

    Args:
        setup: The run.
        hardware: The machine.
        what_if: Changes of the machine or of the run.
        beside: Where one of two runs is traced while the other is traced here; None for one after the other.

    Raises:
        LssError: The run would be refused, or the target fails.
    """
    number = num_like_layers(setup)
    setup = _at_the_busiest(setup)
    if number <= FEW[1]:
        return _played(setup, traced(setup), hardware, what_if)
    small, large = (replace(setup, depth=depth) for depth in FEW)
    waiting = beside.submit(traced, large) if beside else None
    try:
        few = _played(small, traced(small), hardware, what_if)
        more = _played(large, waiting.result() if waiting else traced(large), hardware, what_if)
    except LssError:  # it may count its layers itself
        return _played(setup, traced(setup), hardware, what_if)
    return extrapolated(setup, few, more, number - FEW[0])


def _at_the_busiest(setup: Setup) -> Setup:
    """The same on the rank that holds most: of functions, whose models may see both ways, two are looked at."""
    ranks = {setup.rank, setup.rank_of_one_piece}
    if not setup.target or len(ranks) == 1:
        return setup
    try:
        found = {rank: peaks(traced(replace(setup, at=rank, depth=FEW[0]))) for rank in ranks}
    except LssError:  # it may count its layers itself
        return setup
    return replace(setup, at=max(ranks, key=lambda rank: max(peak.total for peak in found[rank])))


def serial_plan(plan: Plan) -> Plan | None:
    """The same sequences of one data group on one rank, to compare with; None where it has too many blocks."""
    config = plan.setup.config
    if plan.setup.device_type == "cpu" and config.data.length > LONGEST_SERIAL:
        return None
    parallel = replace(config.parallel, sequence=1, data=1, strategy="lss", shard_parameters=False)
    attention = replace(config.attention, keep=True, chunks=1)
    alone = replace(plan.setup, at=None, config=replace(config, parallel=parallel, attention=attention))
    return make_plan(alone, plan.hardware)


def _played(setup: Setup, trace: Trace, hardware: Hardware, what_if: WhatIf) -> Plan:
    machine = hardware
    if what_if.hierarchical:
        by_nodes: dict[str, Algorithm] = {"all_gather": "hierarchical", "reduce_scatter": "hierarchical"}
        machine = replace(hardware, collectives={**hardware.collectives, **by_nodes})

    def seconds_of(entry: Entry, num_bytes: int) -> float:
        is_of_attention = entry.phase in ("forward", "backward")
        sent = num_bytes / what_if.compression if is_of_attention else num_bytes
        return seconds(machine, entry.operation, sent, setup.group(entry.axis, machine.ranks_per_node))

    line = play(trace.events, machine, seconds_of, setup.num_ranks, what_if.straggler)
    plan = Plan(setup, hardware, tuple(peaks(trace)), trace.flops, _messages(trace, line), line, what_if)
    return overlapped(plan) if what_if.overlap else plan


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
