"""A plan, or what a search for the fastest has found, as a page that needs no other file."""

from __future__ import annotations

from dataclasses import asdict

from matplotlib.axes import Axes

from lss.drawing import SHARES, stacked, svg
from lss.page import Figure, Heading, Paragraph, Part, Table, page
from lss.plan.choice import SHOWN, Best, command_of, kept
from lss.plan.memory import KINDS
from lss.plan.report import Planned, asked, memory, messages, step, verdict
from lss.plan.result import Plan

_COLOURS = dict(zip(KINDS, ("#2f6690", "#81a4cd", "#16425b", "#d98c3f", "#7a9e7e", "#bbbbbb"), strict=True))
_ABOUT = (
    "Planned, not measured: one rank's step, on tensors without values, played on the machine's rates. Fragmentation "
    "of the allocator, other jobs on the network and thermal throttling are left out."
)


def written(found: Best | Planned) -> str:
    """The page."""
    first = found.plans[0] if isinstance(found, Best) else found.plan
    parts = _best(found) if isinstance(found, Best) else _planned(found)
    return page(f"Plan of {_name(first)}", [Paragraph(_ABOUT), *parts, _machine(first)])


def _planned(found: Planned) -> list[Part]:
    plan = found.plan
    told = [Paragraph(found.found)] if found.found else []
    return [
        *told,
        _asked(plan),
        *verdict(plan),
        Heading("Memory"),
        _memory_bars({"": plan}),
        memory(plan),
        Heading("Messages"),
        messages(plan),
        Heading("Step"),
        _step_bars({"": plan}),
        step(plan, found.base),
    ]


def _best(found: Best) -> list[Part]:
    shown = {f"{number}: {_how(plan)}": plan for number, plan in enumerate(found.plans[:SHOWN], 1)}
    return [
        Paragraph(f"The fastest way: {asked(found.plans[0])}"),
        *(Paragraph(text) for text in found.told()),
        Paragraph(command_of(found.plans[0])),
        found.table(),
        _step_bars(shown),
        _memory_bars(shown),
    ]


def _name(plan: Plan) -> str:
    return plan.setup.target or plan.setup.config.model.preset


def _how(plan: Plan) -> str:
    parallel, attention = plan.setup.config.parallel, plan.setup.config.attention
    return f"{parallel.data} x {parallel.sequence}, {attention.gather}, {kept(plan)}"


def _asked(plan: Plan) -> Table:
    """All that can differ from one plan to the next."""
    config = plan.setup.config
    rows = {
        "model": _name(plan),
        "tokens of a sequence": f"{config.data.length:,}",
        "data groups x ranks of a sequence": f"{config.parallel.data} x {config.parallel.sequence}",
        "sequences a group and step": str(config.train.batch),
        "micro-batches": str(config.train.accumulation),
        "precision": config.train.precision,
        "strategy": config.parallel.strategy,
        "parameters cut over all ranks": _yes(config.parallel.shard_parameters),
        "layers computed again in backward": _yes(config.train.recompute),
        "gather": f"{config.attention.gather}, {kept(plan)}",
        "kernel, layout": f"{config.attention.kernel}, {config.attention.layout}",
    }
    changes = {f"what if: {name}": str(value) for name, value in asdict(plan.what_if).items()}
    usual = {f"what if: {name}": str(value) for name, value in asdict(type(plan.what_if)()).items()}
    rows |= {name: value for name, value in changes.items() if value != usual[name]}
    return Table("What was asked", ("", ""), tuple(rows.items()))


def _machine(plan: Plan) -> Paragraph:
    return Paragraph(f"Machine: {plan.hardware.name}. Figures: {plan.hardware.source}.")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _memory_bars(plans: dict[str, Plan]) -> Figure:
    limit = next(iter(plans.values())).hardware.memory / 1e9

    def draw(axes: Axes) -> None:
        bars = {name: {kind: size / 1e9 for kind, size in plan.peak.bytes.items()} for name, plan in plans.items()}
        stacked(axes, bars, _COLOURS)
        if limit < 2 * max(plan.peak.total for plan in plans.values()) / 1e9:  # else it would squeeze the bars
            axes.axvline(limit, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xlabel("GB")

    caption = f"Memory of the busiest rank, at peak; dotted, the {limit:g} GB of a rank, where they are near"
    return Figure(caption, svg("memory", draw, _height(plans)))


def _step_bars(plans: dict[str, Plan]) -> Figure:
    def draw(axes: Axes) -> None:
        bars = {name: {part: getattr(plan.timeline, part) for part in SHARES} for name, plan in plans.items()}
        stacked(axes, bars, SHARES)
        axes.set_xlabel("seconds")

    return Figure(
        "Seconds of a step; communication is what computation does not hide", svg("step", draw, _height(plans))
    )


def _height(plans: dict[str, Plan]) -> float:
    return 1.5 + 0.3 * len(plans)
