"""A comparison for people: tables, and who is fastest where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lss.page import Part, Points, Table

Row = dict[str, Any]

_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "strategy": ("", str),
    "length": ("length", lambda value: f"{value:,}"),
    "ranks": ("ranks", str),
    "seconds_min": ("s min", lambda value: f"{value:.3f}"),
    "seconds_median": ("median", lambda value: f"{value:.3f}"),
    "planned_seconds": ("planned", lambda value: f"{value:.3f}"),
    "tokens_per_second": ("tokens/s", lambda value: f"{value:,.0f}"),
    "waited_seconds": ("wait s", lambda value: f"{value:.3f}"),
    "cpu_seconds": ("cpu s", lambda value: f"{value:.3f}"),
    "peak_bytes": ("MB", lambda value: f"{value / 1e6:,.0f}"),
    "collectives_a_layer": ("sends/layer", lambda value: f"{value:g}"),
    "bytes_a_layer": ("MB/layer", lambda value: f"{value / 1e6:.2f}"),
    "difference": ("differs", lambda value: f"{value:.0e}"),
}
LEGEND = (
    "s: of a training step, all ranks, the fastest and the median of the repeats, in turn",
    "planned: what lss plan says of the hardware that was named",
    "wait: seconds in which the rank that waited longest started or awaited collectives",
    "cpu: seconds of the processor, of the rank that took most: what counts where ranks share cores",
    "MB: bytes of tensors at the peak of a step, busiest rank; sends: collectives of a layer of the model",
    "differs: largest deviation of a gradient from plain torch's, as a share of the largest entry of that gradient",
)


def parts(rows: Sequence[Row], memory: float) -> list[Part]:
    """Tables of what ran and of what did not, and the fastest at each length."""
    ran = [row for row in rows if "seconds_min" in row]
    shown = [name for name in _COLUMNS if any(name in row for row in ran)]
    cells = tuple(tuple(_COLUMNS[name][1](row[name]) if name in row else "" for name in shown) for row in ran)
    title = f"{rows[0]['preset']}, batch {rows[0]['batch']}, a training step"
    found: list[Part] = [Table(title, tuple(_COLUMNS[name][0] for name in shown), cells), Points(LEGEND)]
    reasons = [reason for row in rows if (reason := _reason(row, memory))]
    return [*found, *([Points(tuple(reasons))] if reasons else []), Points(tuple(fastest(ran)))]


def _reason(row: Row, memory: float) -> str:
    """Why a way did not run; empty if it did."""
    name = f"{row['strategy']} at {row['length']:,} tokens"
    if "refused" in row:
        return f"{name}: refused: {row['refused']}"
    if "seconds_min" not in row:
        return f"{name}: out of memory: {row['planned_bytes'] / 1e9:.3f} GB planned, {memory / 1e9:g} GB allowed"
    return ""


def fastest(ran: Sequence[Row]) -> list[str]:
    """The fastest of those over ranks at each length, by how much, and where they change places."""
    told = []
    for length in dict.fromkeys(row["length"] for row in ran):
        rivals = sorted((row for row in ran if row["length"] == length and row["ranks"] > 1), key=_seconds)
        if len(rivals) > 1:
            share = rivals[1]["seconds_min"] / rivals[0]["seconds_min"] - 1
            second = f"{rivals[1]['strategy']} takes {share:.1%} longer"
            told.append(f"{length:,} tokens: {rivals[0]['strategy']} is the fastest over ranks; {second}")
    return told


def _seconds(row: Row) -> float:
    return float(row["seconds_min"])
