"""What `lss paper` goes through, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lss.paper import figures
from lss.paper.records import Record
from lss.paper.tables import TABLES, records


@dataclass(frozen=True)
class Section:
    """A table or figure of the paper.

    Args:
        title: What it shows.
        compute: Its figures.
        grids: The tables in which it is shown, by what their captions add to the title: columns, as keys of
            `QUANTITIES` with what of them.
        note: What has to be known to read it.
    """

    title: str
    compute: Callable[[], list[Record]]
    grids: dict[str, tuple[tuple[str, str], ...]]
    note: str = ""


_ALL = ("paper", "plan", "deviation")


def _columns(*quantities: str) -> tuple[tuple[str, str], ...]:
    return tuple((quantity, which) for quantity in quantities for which in _ALL)


_OF_TABLES = {
    "memory": _columns("gigabytes"),
    "attention's operations": (*_columns("attention"), ("length_ratio", "plan")),
    "speed": (("step_ms", "plan"), ("tflops", "paper"), ("tflops", "plan"), *_columns("tflops_ratio")),
    "efficiency": (
        ("efficiency_stated", "paper"),
        ("efficiency_of_flops", "paper"),
        ("efficiency_of_flops", "plan"),
        ("efficiency_of_time", "plan"),
    ),
}
_INCREASE = (
    "The paper's increase of attention is near the ratio of lengths. A rank's products of scores grow as L^2 / N: "
    "where lengths grow as the root of the GPUs, not at all."
)

SECTIONS = {
    **{
        name: Section(
            f"Table {name}. {table.title}",
            partial(records, name),
            _OF_TABLES,
            _INCREASE if name in ("5a", "6a") else "",
        )
        for name, table in TABLES.items()
    },
    "figure-4a": Section(
        "Figure 4(a). Efficiency without fusion and without averaging, 864 GPUs, 50,112 tokens",
        figures.ablation,
        {"": (("step_ms", "plan"), *_columns("efficiency_at_864"))},
        "The first is the paper's own, of Table 3a; the others are it times the seconds of the first / theirs.",
    ),
    "figure-4b": Section(
        "Figure 4(b). Longest sequence that fits 16 GB",
        figures.lengths,
        {"": _columns("longest")},
        "The plan's is the longest multiple of the GPUs.",
    ),
    "figure-4c": Section(
        "Figure 4(c). Shares of a step's seconds, runs of Table 3a",
        figures.shares,
        {"": (("computation", "plan"), *_columns("communication"), ("waiting", "plan"))},
        "The paper's text gives two of the shares.",
    ),
    "collectives": Section(
        "Collectives of a layer, forward and backward",
        figures.collectives,
        {"": _columns("collectives")},
        "Counted in the plan's messages of 36 GPUs (nvidia) and 864 (the others).",
    ),
    "rival": Section(
        "LSS beside its rival",
        figures.rivals,
        {"": _columns("times_faster", "times_smaller")},
        "Times faster: the ratio of FLOP/s in the paper, of seconds of a step in the plan.",
    ),
    "utilisation": Section(
        "GPU utilisation",
        figures.utilisation,
        {"": (("utilisation", "paper"), ("computing", "plan"), ("computing_or_sending", "plan"))},
        "The plan's are not the paper's quantity, but what is nearest to it.",
    ),
}
