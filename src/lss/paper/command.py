"""`lss paper`: its flags, and what it writes."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress

from lss.command import check_reports, write, write_json
from lss.errors import ConfigError
from lss.page import Figure, Heading, Paragraph, Part, markdown, page, show
from lss.paper import report
from lss.paper.records import Record
from lss.paper.sections import SECTIONS
from lss.paper.setting import ASSUMPTIONS, SMALL_GPU, UNKNOWN, machine

# Headings of a report, and the sections below them.
_GROUPS = {
    "Tables": tuple(name for name in SECTIONS if name[0].isdigit()),
    "Figures": ("figure-4a", "figure-4b", "figure-4c"),
    "What else the paper says": ("collectives", "rival", "utilisation"),
}
_DRAWN = {"memory": "Memory a GPU: the paper's figures are marks, the plan's are lines; dotted, 16 and 32 GB"}


def paper(arguments: Sequence[str]) -> int:
    """Run `lss paper`.

    Raises:
        ConfigError: A flag is wrong, or what `--html` needs is not installed; before anything is planned.
        RunError: A file cannot be written.
    """
    given = _flags().parse_args(list(arguments))
    names = tuple(name for name in SECTIONS if name in (given.sections or SECTIONS))
    _check(given)
    records = _planned(names)
    parts = _parts(names, records)
    show(parts, Console(width=None if sys.stdout.isatty() else 120))
    if given.json:
        write_json(_as_json(records), given.json)
    if given.markdown:
        write(given.markdown, markdown(report.TITLE, [Paragraph("Made by `lss paper --markdown FILE`."), *parts]))
    if given.html:
        write(given.html, page(report.TITLE, [*parts, *_drawings(names, records)]))
    return 0


def _flags() -> ArgumentParser:
    made = ArgumentParser(
        prog="lss paper", description="The paper's tables and figures beside the plan's. All of them take two minutes."
    )
    made.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (default: all)")
    made.add_argument("--html", default="", help="a file for a report with drawings; needs matplotlib")
    made.add_argument("--markdown", default="", help="a file for the same as Markdown, without drawings")
    made.add_argument("--json", default="", help="a file for all figures")
    return made


def _check(given: Namespace) -> None:
    for name in given.sections:
        if name not in SECTIONS:
            raise ConfigError(f"section {name!r}", allowed=", ".join(SECTIONS))
    check_reports(html=given.html, markdown=given.markdown, json=given.json)


def _planned(names: Sequence[str]) -> list[Record]:
    """All figures; how far it is goes to standard error: a bar on a terminal, else a line a section."""
    console, found = Console(stderr=True), []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("planning", total=len(names))
        for name in names:
            started = time.perf_counter()
            progress.update(task, description=name)
            found += SECTIONS[name].compute()
            progress.advance(task)
            if not console.is_terminal:
                print(f"planned {name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    return found


def _parts(names: Sequence[str], records: Sequence[Record]) -> list[Part]:
    parts = [*report.before(), Heading("In short"), *report.summary(records)]
    for heading, members in _GROUPS.items():
        shown = [name for name in members if name in names]
        parts += [Heading(heading)] if shown else []
        for name in shown:
            parts += report.section(name, [record for record in records if record.section == name])
    return [*parts, *report.after()]


def _drawings(names: Sequence[str], records: Sequence[Record]) -> list[Part]:
    from lss.paper.drawings import DRAWINGS, drawn  # noqa: PLC0415  (matplotlib is optional)

    captions = {name: SECTIONS[name].title for name in names if name in DRAWINGS}
    captions |= _DRAWN if any(name[0] in "356" for name in names) else {}
    figures = [Figure(caption, drawn(name, records)) for name, caption in captions.items()]
    return [Heading("Drawings"), *figures] if figures else []


def _as_json(records: Sequence[Record]) -> dict[str, object]:
    hardware = machine(SMALL_GPU)
    return {
        "hardware": {"name": hardware.name, "source": hardware.source},
        "assumptions": ASSUMPTIONS,
        "unknown": UNKNOWN,
        "rows": [record.to_dict() for record in records],
    }
