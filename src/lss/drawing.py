"""Drawings with matplotlib, without pyplot and its global state; only what draws imports this file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from io import StringIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Parts of a step's seconds.
SHARES = {"computation": "#2f6690", "communication": "#d98c3f", "waiting": "#999999"}


def svg(name: str, draw: Callable[[Axes], None], height: float = 3.8) -> str:
    """A drawing as SVG, the same in every run.

    Args:
        name: What tells it from the others of a page.
        draw: Draws it.
        height: Inches, of 7.2 in width.
    """
    figure = Figure(figsize=(7.2, height), layout="constrained")
    draw(figure.add_subplot())
    written = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return re.sub(r'<g id="[^"]*">', "<g>", written.getvalue())  # the same names in every drawing of a page


def stacked(axes: Axes, bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> None:
    """Horizontal bars of parts beside each other, the first on top.

    Args:
        axes: Where.
        bars: Lengths of the parts, by bar and part.
        colours: By part, in order.
    """
    begins = dict.fromkeys(bars, 0.0)
    for part, colour in colours.items():
        lengths = [parts.get(part, 0.0) for parts in bars.values()]
        axes.barh(list(bars), lengths, 0.6, left=list(begins.values()), color=colour, label=part)
        begins = {name: begins[name] + length for name, length in zip(bars, lengths, strict=True)}
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
