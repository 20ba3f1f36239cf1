"""The paper's tables 3 to 6, run by run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lss.paper.facts import Fact, table
from lss.paper.records import Record
from lss.paper.setting import GIGABYTE, Run
from lss.plan import Plan
from lss.plan.plan import traced
from lss.plan.trace import Operator

# Lengths that Tables 5a and 5b do not give, by GPUs.
ASSUMED = {6: 360, 108: 1512}


@dataclass(frozen=True)
class Scaling:
    """One of the paper's tables.

    Args:
        facts: Its name in `tables.json`.
        title: What it shows.
        model: As of `Run`.
        strategy: The same.
        groups: The same.
        first: A first row, which efficiencies refer to, where the paper's figures lack it.
    """

    facts: str
    title: str
    model: Literal["small", "large"] = "small"
    strategy: Literal["lss", "megatron"] = "lss"
    groups: int = 1
    first: Fact | None = None

    def run(self, fact: Fact) -> Run:
        """The run of a row."""
        length = fact.length or ASSUMED[fact.gpus]
        return Run(self.model, fact.gpus // self.groups, length, self.groups, strategy=self.strategy)

    def rows(self) -> tuple[Fact, ...]:
        """All of its rows, the first one added where need be."""
        return ((self.first,) if self.first else ()) + table(self.facts)


TABLES = {
    "3a": Scaling("3a_lss_linear", "LSS, small model, length grows as the GPUs"),
    "3b": Scaling("3b_nvidia_linear", "The rival (Nvidia's sequence parallelism), as Table 3a", strategy="megatron"),
    "4a": Scaling("4a_lss_linear_4_data_groups", "LSS, as Table 3a with 4 data groups", groups=4),
    "4b": Scaling(
        "4b_nvidia_linear_4_data_groups",
        "The rival, as Table 4a",
        strategy="megatron",
        groups=4,
        first=Fact(24, 348),
    ),
    "5a": Scaling("5a_lss_sqrt", "LSS, small model, length grows as the root of the GPUs", first=Fact(6, None)),
    "5b": Scaling("5b_nvidia_sqrt", "The rival, as Table 5a", strategy="megatron"),
    "6a": Scaling("6a_lss_large_sqrt", "LSS, large model, length grows as the root of the GPUs", "large"),
    "6b": Scaling("6b_nvidia_large_sqrt", "The rival, as Table 6a", "large", "megatron"),
}


def records(name: str) -> list[Record]:
    """All figures of a table."""
    scaling = TABLES[name]
    rows = [_Row(name, fact, scaling.run(fact).plan()) for fact in scaling.rows()]
    by_flops = next((row for row in rows if row.fact.tflops), rows[0])
    has_attention = any(row.fact.attention for row in rows)
    found: list[Record] = []
    for row in rows:
        found += _memory(row)
        found += _attention(row, rows[0]) if has_attention else []
        found += _speed(row, rows[0], by_flops) if row.plan.fits else []
    return found


@dataclass(frozen=True)
class _Row:
    table: str
    fact: Fact
    plan: Plan

    def record(self, quantity: str, paper: float | None, plan: float | None) -> Record:
        length = self.plan.setup.config.data.length
        run = f"{self.fact.gpus:,} x {length:,}" + ("" if self.fact.length else " (assumed)")
        return Record(self.table, run, quantity, paper, plan, self.fact.gpus, length)


def _memory(row: _Row) -> Iterator[Record]:
    yield row.record("gigabytes", row.fact.gigabytes, row.plan.peak.total / GIGABYTE)
    yield row.record("fits", row.fact.ran, row.plan.fits)


def _attention(row: _Row, first: _Row) -> Iterator[Record]:
    yield row.record("attention", row.fact.attention, _scores(row.plan) / _scores(first.plan))
    longer = row.plan.setup.config.data.length / first.plan.setup.config.data.length
    yield row.record("length_ratio", None, longer)


def _speed(row: _Row, first: _Row, by_flops: _Row) -> Iterator[Record]:
    fact, plan = row.fact, row.plan
    speed, seconds = plan.flops_per_second, plan.timeline.total
    own = _ratio(fact.tflops, first.fact.tflops, 100 * first.fact.gpus / fact.gpus)
    planned = _ratio(speed, first.plan.flops_per_second, 100 * first.fact.gpus / fact.gpus)
    yield row.record("step_ms", None, 1e3 * seconds)
    yield row.record("tflops", fact.tflops, speed / 1e12)
    if fact.tflops:
        ratio = _ratio(fact.tflops, by_flops.fact.tflops)
        yield row.record("tflops_ratio", ratio, speed / by_flops.plan.flops_per_second)
    yield row.record("efficiency_stated", fact.efficiency, None)
    yield row.record("efficiency_of_flops", own, planned)
    yield row.record("efficiency_of_time", None, 100 * first.plan.timeline.total / seconds)


def _ratio(one: float | None, other: float | None, times: float = 1.0) -> float | None:
    return times * one / other if one and other else None


def _scores(plan: Plan) -> int:
    """Operations of a rank's products of queries and keys, and of weights and values."""
    events = traced(plan.setup).events
    return sum(event.flops for event in events if isinstance(event, Operator) and event.work == "batched")
