"""Pages of text, tables and drawings, written as HTML, as Markdown, or to a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text


@dataclass(frozen=True)
class Heading:
    """The name of what follows.

    Args:
        text: Of it.
    """

    text: str


@dataclass(frozen=True)
class Paragraph:
    """Running text.

    Args:
        text: Of it.
    """

    text: str


@dataclass(frozen=True)
class Points:
    """A list.

    Args:
        texts: One a point.
    """

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table; columns but the first are set to the right.

    Args:
        caption: What it shows.
        head: Names of the columns; empty ones for a table without.
        rows: Cells.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A drawing: in HTML only.

    Args:
        caption: What it shows.
        svg: The drawing, an SVG document; it is written as it is.
    """

    caption: str
    svg: str


Part = Heading | Paragraph | Points | Table | Figure

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0 2rem; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: 0.3rem; }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0 2rem; } figcaption { font-weight: 600; } svg { max-width: 100%; height: auto; }
"""


def page(title: str, parts: Sequence[Part]) -> str:
    """One HTML file that needs no other; all text is escaped.

    >>> "<p>1 &lt; 2</p>" in page("Numbers", [Paragraph("1 < 2")])
    True
    """
    body = "\n".join(_html(part) for part in parts)
    head = f'<meta charset="utf-8"/>\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n'
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _html(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h2>{escape(part.text)}</h2>"
    if isinstance(part, Paragraph):
        return f"<p>{escape(part.text)}</p>"
    if isinstance(part, Points):
        return "<ul>\n" + "\n".join(f"<li>{escape(text)}</li>" for text in part.texts) + "\n</ul>"
    if isinstance(part, Figure):
        drawing = part.svg[part.svg.index("<svg") :]  # without the lines that make it a file of its own
        return f"<figure>\n<figcaption>{escape(part.caption)}</figcaption>\n{drawing.strip()}\n</figure>"
    rows = "\n".join(_html_row(row, "td") for row in part.rows)
    head = f"<thead>\n{_html_row(part.head, 'th')}\n</thead>" if any(part.head) else ""
    return f"<table>\n<caption>{escape(part.caption)}</caption>\n{head}\n<tbody>\n{rows}\n</tbody>\n</table>"


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def markdown(title: str, parts: Sequence[Part]) -> str:
    """The same as Markdown, without drawings.

    >>> print(markdown("Numbers", [Table("Squares", ("of", "is"), (("2", "4"),))]), end="")
    # Numbers
    <BLANKLINE>
    Squares
    <BLANKLINE>
    | of | is |
    | --- | ---: |
    | 2 | 4 |
    """
    texts = [f"# {title}", *(_markdown(part) for part in parts if not isinstance(part, Figure))]
    return "\n\n".join(texts) + "\n"


def _markdown(part: Heading | Paragraph | Points | Table) -> str:
    if isinstance(part, Heading):
        return f"## {part.text}"
    if isinstance(part, Paragraph):
        return _wrapped(part.text)
    if isinstance(part, Points):
        return "\n".join(_wrapped(f"- {text}", indent="  ") for text in part.texts)
    rule = ("---", *("---:" for _ in part.head[1:]))
    lines = [part.head, rule, *part.rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return f"{part.caption}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def show(parts: Sequence[Part], console: Console) -> None:
    """The same on a terminal, without drawings."""
    for part in parts:
        if isinstance(part, Heading):
            console.print(Text(part.text, style="bold"))
        elif isinstance(part, Paragraph):
            console.print(Text(part.text), end="\n\n")
        elif isinstance(part, Points):
            for text in part.texts:
                console.print(Text(f"- {text}"))
            console.print()
        elif isinstance(part, Table):
            console.print(_grid(part))


def _grid(table: Table) -> Grid:
    grid = Grid(
        title=table.caption,
        title_justify="left",
        title_style="",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(table.head),
    )
    for number, name in enumerate(table.head):
        grid.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid
