"""A plan for people, and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from lss.plan.result import Plan


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


def show(plan: Plan, base: Plan | None, console: Console) -> None:
    """Print a plan."""
    config, line = plan.setup.config, plan.timeline
    console.print(
        f"[bold]{plan.setup.target or config.model.preset}[/], {config.data.length:,} tokens x {config.train.batch} "
        f"a group, {config.parallel.data} x {config.parallel.sequence} ranks of {plan.hardware.name}, "
        f"{config.train.precision}, {config.parallel.strategy}"
    )
    console.print(_memory(plan))
    console.print(_collectives(plan))
    table = Table(title="step", show_header=False)
    for name, value in _step_rows(plan, base).items():
        table.add_row(name, value)
    console.print(table)
    fits = "fits into" if plan.fits else "[bold red]does NOT fit into[/]"
    console.print(
        f"{gigabytes(plan.peak.total)} at peak, in {plan.peak.phase}: {fits} {gigabytes(plan.hardware.memory)}"
    )
    if not plan.what_if.is_exact:
        console.print("[bold]compressed messages: such a run would NOT equal the serial one[/]")
    if line.total and plan.communication_share > 0.5:
        console.print("more than half of the step is communication: fewer ranks a sequence, or more data groups")


def _memory(plan: Plan) -> Table:
    table = Table("", "bytes", "share", title="memory of the busiest rank, at peak")
    for kind, size in plan.peak.bytes.items():
        table.add_row(kind, gigabytes(size), f"{size / plan.peak.total:.0%}")
    return table


def _collectives(plan: Plan) -> Table:
    table = Table("collective", "axis", "pass", "count", "sent", "seconds", title="messages of a rank and step")
    for message in plan.messages:
        table.add_row(
            message.operation,
            message.axis,
            message.phase,
            str(message.count),
            gigabytes(message.bytes),
            f"{message.seconds:.4f}",
        )
    return table


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
