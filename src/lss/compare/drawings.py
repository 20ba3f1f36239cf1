"""A comparison, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from lss.compare.report import Row, parts
from lss.drawing import svg
from lss.page import Figure, Paragraph, page

_ABOUT = (
    "One training step of the same model on the same batch, by each strategy in turn on the same ranks. Lines are "
    "measured, dashes planned."
)


def written(rows: Sequence[Row], memory: float) -> str:
    """The page."""
    tables = parts(rows, memory)
    drawn = {"Seconds of a step": ("seconds_min", "planned_seconds", 1.0)}
    drawn["GB of the busiest rank"] = "peak_bytes", "planned_bytes", 1e9
    drawings = [Figure(caption, svg(names[0], partial(_lines, rows, *names))) for caption, names in drawn.items()]
    return page(f"Strategies compared: {rows[0]['preset']}", [Paragraph(_ABOUT), *drawings, *tables])


def _lines(rows: Sequence[Row], measured: str, planned: str, unit: float, axes: Axes) -> None:
    """A quantity by length, a line a strategy."""
    for name in dict.fromkeys(row["strategy"] for row in rows):
        own = [row for row in rows if row["strategy"] == name]
        ran = [row for row in own if measured in row]
        (line,) = axes.plot([row["length"] for row in ran], [row[measured] / unit for row in ran], "o-", label=name)
        told = [row for row in own if planned in row]
        axes.plot([row["length"] for row in told], [row[planned] / unit for row in told], "--", color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({row["length"] for row in rows})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(True, which="major", linewidth=0.3)
    axes.set_xlabel("tokens of a sequence")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
