"""The paper's figures and the plan's, drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from lss.drawing import SHARES, svg
from lss.paper.records import Record

_PAPER, _PLAN = "#b7793a", "#2f6690"
_MARKERS = {"3a": "o", "3b": "s", "5a": "^", "5b": "v", "6a": "D", "6b": "P"}


def drawn(name: str, records: Sequence[Record]) -> str:
    """The drawing of one of the paper's figures, or of the memory of all tables, as SVG.

    Args:
        name: `figure-4a`, `figure-4b`, `figure-4c` or `memory`.
        records: All figures.
    """
    return svg(name, lambda axes: DRAWINGS[name](axes, records))


def _ablation(axes: Axes, records: Sequence[Record]) -> None:
    shown = _of(records, "figure-4a", "efficiency_at_864")
    places = range(len(shown))
    for shift, which, colour in ((-0.2, "paper", _PAPER), (0.2, "plan", _PLAN)):
        heights = [record.number(which) for record in shown]
        bars = axes.bar([place + shift for place in places], heights, 0.38, color=colour, label=which)
        axes.bar_label(bars, fmt="%.0f")
    axes.set_xticks(list(places), [record.run for record in shown])
    axes.set_ylabel("efficiency, %")
    axes.legend()


def _lengths(axes: Axes, records: Sequence[Record]) -> None:
    shown = _of(records, "figure-4b", "longest")
    for which, style, colour in (("paper", "o--", _PAPER), ("plan", "s-", _PLAN)):
        numbers = [record.number(which) for record in shown]
        axes.plot([record.gpus for record in shown], numbers, style, color=colour, label=which)
    _logarithmic(axes, sorted({record.gpus for record in shown}))
    axes.set_yticks([6000, 8000, 12000, 16000, 24000])
    axes.set_yticks([], minor=True)
    axes.set_ylabel("tokens that fit 16 GB")
    axes.legend()


def _shares(axes: Axes, records: Sequence[Record]) -> None:
    names = [str(record.gpus) for record in _of(records, "figure-4c", "communication")]
    below = [0.0] * len(names)
    for part, colour in SHARES.items():
        heights = [record.number("plan") for record in _of(records, "figure-4c", part)]
        axes.bar(names, heights, 0.6, bottom=below, color=colour, label=f"{part}, plan")
        below = [one + other for one, other in zip(below, heights, strict=True)]
    _paper_shares(axes, records)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("share of a step, %")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _paper_shares(axes: Axes, records: Sequence[Record]) -> None:
    """Communication as the paper has it, as a length from where the plan's begins."""
    label = "communication, paper"
    for place, record in enumerate(_of(records, "figure-4c", "communication")):
        if record.paper is not None:
            start = _of(records, "figure-4c", "computation")[place].number("plan")
            axes.plot([place - 0.38] * 2, [start, start + record.paper], color="black", marker="_", label=label)
            label = ""


def _memory(axes: Axes, records: Sequence[Record]) -> None:
    shown = [record for record in records if record.quantity == "gigabytes" and record.section in _MARKERS]
    for table, group in groupby(shown, key=lambda record: record.section):
        rows = list(group)
        gpus = [row.gpus for row in rows]
        (line,) = axes.plot(gpus, [row.number("plan") for row in rows], label=f"{table}, plan")
        marks = [row.number("paper") for row in rows]
        axes.plot(gpus, marks, _MARKERS[table], color=line.get_color(), label=f"{table}, paper")
    axes.axhline(16, color="#999999", linewidth=0.8, linestyle=":")
    axes.axhline(32, color="#999999", linewidth=0.8, linestyle=":")
    _logarithmic(axes, [6, 36, 108, 324, 864])
    axes.set_ylabel("GB a GPU")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")


DRAWINGS: dict[str, Callable[[Axes, Sequence[Record]], None]] = {
    "memory": _memory,
    "figure-4a": _ablation,
    "figure-4b": _lengths,
    "figure-4c": _shares,
}


def _of(records: Sequence[Record], section: str, quantity: str) -> list[Record]:
    return [record for record in records if (record.section, record.quantity) == (section, quantity)]


def _logarithmic(axes: Axes, ticks: list[int]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(True, which="major", linewidth=0.3)
    axes.set_xlabel("GPUs")
