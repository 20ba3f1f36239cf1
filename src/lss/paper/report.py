"""The paper beside the plan, as parts of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lss.page import Heading, Paragraph, Part, Points, Table
from lss.paper.records import QUANTITIES, Record
from lss.paper.sections import SECTIONS
from lss.paper.setting import ASSUMPTIONS, UNKNOWN

TITLE = "The paper beside the plan"
_ABOUT = (
    'Every table and figure of "Ultra-Long Sequence Distributed Transformer" (arXiv 2311.02382), beside what the '
    "planner says of the same runs. A plan takes one rank's real step, on tensors without values, counts its memory, "
    "operations and messages, and plays it on a machine's rates. Nothing here was measured. Runs are named GPUs x "
    "tokens of a sequence; – is a figure that is not given."
)
_NONE = "–"  # as of `Record.cell`
_TABLES = ("3a", "3b", "4a", "4b", "5a", "5b", "6a", "6b")
# What the first table sums up: a name, the quantity, and the sections.
_SUMMED = (
    ("Memory a GPU, Tables 3 to 6", "gigabytes", _TABLES),
    ("Longest sequence, Figure 4(b)", "longest", ("figure-4b",)),
    ("Efficiency, Figure 4(a)", "efficiency_at_864", ("figure-4a",)),
    ("Share of communication, Figure 4(c)", "communication", ("figure-4c",)),
    ("Ratio of FLOP/s, Table 3a (fitted)", "tflops_ratio", ("3a",)),
    ("Ratio of FLOP/s, other tables of LSS", "tflops_ratio", ("4a", "5a", "6a")),
    ("Ratio of FLOP/s, tables of the rival", "tflops_ratio", ("3b", "4b", "5b", "6b")),
    ("Times faster than the rival", "times_faster", ("rival",)),
    ("Times less memory than the rival", "times_smaller", ("rival",)),
    ("Collectives of a layer", "collectives", ("collectives",)),
)


def before() -> list[Part]:
    """What has to be read first."""
    return [Paragraph(_ABOUT), Heading("Assumptions"), Points(ASSUMPTIONS)]


def after() -> list[Part]:
    """What the plan cannot know."""
    return [Heading("What the plan cannot know"), Points(UNKNOWN)]


def summary(records: Sequence[Record]) -> list[Part]:
    """How far the plan is from the paper, in one table."""
    rows = [row for line in _SUMMED for row in _summed(records, *line)]
    verdicts = [record for record in records if record.quantity == "fits" and record.paper is not None]
    if verdicts:
        right = sum(record.paper == record.plan for record in verdicts)
        rows.insert(1, ("Fits or is out of memory", str(len(verdicts)), f"{len(verdicts) - right} wrong"))
    return [Table("Deviations of the plan", ("figures", "number", "largest deviation"), tuple(rows))] if rows else []


def _summed(records: Sequence[Record], name: str, quantity: str, sections: Sequence[str]) -> list[tuple[str, str, str]]:
    """A row, unless nothing can be compared; figures that others refer to deviate by nothing and do not count."""
    compared = [record for record in records if record.quantity == quantity and record.section in sections]
    compared = [record for record in compared if record.deviation is not None and not _is_reference(record)]
    if not compared:
        return []
    worst = max(compared, key=lambda record: abs(record.deviation or 0.0))
    where = f"{worst.cell('deviation')}: {worst.section}, {worst.run}" if worst.deviation else "none"
    return [(name, str(len(compared)), where)]


def _is_reference(record: Record) -> bool:
    is_first = record.run == "fused and averaged" and record.quantity == "efficiency_at_864"
    return is_first or (record.quantity == "tflops_ratio" and record.paper == 1.0)


def section(name: str, records: Sequence[Record]) -> list[Part]:
    """One table or figure of the paper."""
    shown = SECTIONS[name]
    captions = {f"{shown.title}: {kind}" if kind else shown.title: grid for kind, grid in shown.grids.items()}
    tables = (_table(caption, grid, records) for caption, grid in captions.items())
    note = [Paragraph(shown.note)] if shown.note else []
    return [*(table for table in tables if len(table.head) > 1), *note]


def _table(caption: str, columns: Iterable[tuple[str, str]], records: Sequence[Record]) -> Table:
    by_run: dict[str, dict[str, Record]] = {}
    for record in records:
        by_run.setdefault(record.run, {})[record.quantity] = record
    kept = [column for column in columns if any(_cell(found, *column) != _NONE for found in by_run.values())]
    head = ("run", *(f"{QUANTITIES[quantity].name}, {which}" for quantity, which in kept))
    rows = ((run, *(_cell(found, *column) for column in kept)) for run, found in by_run.items())
    return Table(caption, head, tuple(row for row in rows if set(row[1:]) != {_NONE}))


def _cell(found: dict[str, Record], quantity: str, which: str) -> str:
    if quantity not in found:
        return _NONE
    fits = found.get("fits")
    says = None if quantity != "gigabytes" or which == "deviation" else getattr(fits, which, None)
    text = found[quantity].cell(which)
    if says is not False:
        return text
    return "OOM" if text == _NONE else f"OOM ({text})"
