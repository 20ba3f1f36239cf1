"""A plan for people, and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from lss import page
from lss.page import Paragraph, Part, Table
from lss.plan.result import Plan


@dataclass(frozen=True)
class Planned:
    """A plan beside that of one rank.

    Args:
        plan: The plan.
        base: The same sequences on one rank; None where it was not planned.
        found: What a search for it has found; empty without one.
    """

    plan: Plan
    base: Plan | None
    found: str = ""

    def show(self, console: Console) -> None:
        """Print it."""
        for line in filter(None, (self.found, asked(self.plan))):
            console.print(line, style="bold", highlight=False, markup=False)
        console.print()
        tables = memory(self.plan), messages(self.plan), step(self.plan, self.base)
        page.show([*tables, *verdict(self.plan)], console)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return to_dict(self.plan, self.base)


def to_dict(plan: Plan, base: Plan | None) -> dict[str, Any]:
    """A plan as JSON has it: bytes, operations, seconds.

    Args:
        plan: The plan.
        base: The same sequences on one rank; None where it was not planned.
    """
    config, line = plan.setup.config, plan.timeline
    return {
        "target": plan.setup.target or config.model.preset,
        "length": config.data.length,
        "ranks": plan.setup.num_ranks,
        "sequence": config.parallel.sequence,
        "data_groups": config.parallel.data,
        "batch": config.train.batch,
        "precision": config.train.precision,
        "strategy": config.parallel.strategy,
        "shard_parameters": config.parallel.shard_parameters,
        "recompute": config.train.recompute,
        "attention": asdict(config.attention),
        "hardware": plan.hardware.name,
        "what_if": asdict(plan.what_if),
        "is_exact": plan.what_if.is_exact,
        "peak_bytes": plan.peak.total,
        "peak_in": plan.peak.phase,
        "bytes": plan.peak.bytes,
        "memory": plan.hardware.memory,
        "fits": plan.fits,
        "flops": plan.flops,
        "collectives": [asdict(message) for message in plan.messages],
        "step_seconds": line.total,
        "seconds": {"computation": line.computation, "communication": line.communication, "waiting": line.waiting},
        "communication_share": plan.communication_share,
        "flops_per_second": plan.flops_per_second,
        "utilisation": plan.utilisation,
        "tokens_per_second": plan.tokens_per_second,
        "efficiency": efficiency(plan, base),
    }


def efficiency(plan: Plan, base: Plan | None) -> dict[str, float] | None:
    """By time, T_1 / (N T_N), and by throughput, the rate of a rank over that of one rank alone.

    Work that ranks do twice counts for the second, and not for the first.
    """
    if base is None:
        return None
    seconds, alone = plan.timeline.total, base.timeline.total
    return {
        "time": alone / (plan.setup.config.parallel.sequence * seconds),
        "throughput": plan.flops / seconds / (base.flops / alone),
    }


def asked(plan: Plan) -> str:
    """What was planned, in a line."""
    config = plan.setup.config
    return (
        f"{plan.setup.target or config.model.preset}, {config.data.length:,} tokens x {config.train.batch} a group, "
        f"{config.parallel.data} x {config.parallel.sequence} ranks of {plan.hardware.name}, {config.train.precision}, "
        f"{config.parallel.strategy}"
    )


def verdict(plan: Plan) -> list[Part]:
    """Whether it fits, and what else has to be known of it."""
    fits = "fits into" if plan.fits else "does NOT fit into"
    said = [f"{gigabytes(plan.peak.total)} at peak, in {plan.peak.phase}: {fits} {gigabytes(plan.hardware.memory)}"]
    if not plan.what_if.is_exact:
        said.append("compressed messages: such a run would NOT equal the serial one")
    if plan.communication_share > 0.5:
        said.append("more than half of the step is communication: fewer ranks a sequence, or more data groups")
    return [Paragraph(text) for text in said]


def memory(plan: Plan) -> Table:
    """Bytes at peak, by kind."""
    sizes = plan.peak.bytes.items()
    rows = ((kind, gigabytes(size), f"{size / plan.peak.total:.0%}") for kind, size in sizes)
    return Table("memory at peak, busiest rank", ("", "bytes", "share"), tuple(rows))


def messages(plan: Plan) -> Table:
    """What is sent."""
    head = ("collective", "axis", "pass", "count", "sent", "seconds")
    rows = (
        (sent.operation, sent.axis, sent.phase, str(sent.count), gigabytes(sent.bytes), f"{sent.seconds:.4f}")
        for sent in plan.messages
    )
    return Table("messages of a rank and step", head, tuple(rows))


def step(plan: Plan, base: Plan | None) -> Table:
    """Where the seconds go, and what they bring."""
    return Table("step", ("", ""), tuple(_step_rows(plan, base).items()))


def _step_rows(plan: Plan, base: Plan | None) -> dict[str, str]:
    line, peak_rate = plan.timeline, plan.hardware.peak_rate(plan.setup.config.train.precision)
    rows = {
        "seconds": f"{line.total:.4f}",
        "computation": f"{line.computation:.4f} s  {line.computation / line.total:.0%}",
        "exposed communication": f"{line.communication:.4f} s  {plan.communication_share:.0%}",
        "waiting for slower ranks": f"{line.waiting:.4f} s  {line.waiting / line.total:.0%}",
        "operations of a rank": f"{plan.flops / 1e12:.3f} Tflop",
        "of all ranks": f"{plan.flops_per_second / 1e12:.1f} Tflop/s",
        "utilisation": f"{plan.utilisation:.0%} of {peak_rate / 1e12:g} Tflop/s",
        "tokens": f"{plan.tokens_per_second:,.0f} a second",
    }
    found = efficiency(plan, base)
    if found:
        rows["efficiency by time"] = f"{found['time']:.0%} of one rank's seconds over N"
        rows["efficiency by throughput"] = f"{found['throughput']:.0%} of one rank's operations a second"
    return rows


def gigabytes(size: float) -> str:
    """Bytes for people."""
    return f"{size / 1e9:.3f} GB"
