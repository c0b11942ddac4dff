"""What a page shows: sections of charts, each with the table of its numbers; independent of HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair


@dataclass(frozen=True)
class TableValue:
    text: str  # as people read it
    order: float | str | None = None  # what the column is sorted by, and what a download has; None: the text


@dataclass
class TableRow:
    cells: Sequence[str | TableValue]
    anchor: str = ""  # where a link finds the row, unique on the page; empty: it has none
    link: str = ""  # the anchor of the section that the first cell names; empty: none


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]  # headings, with units
    rows: Sequence[TableRow]
    numeric: frozenset[str] = frozenset()  # columns that are aligned to the right


@dataclass
class Chart:
    anchor: str  # unique on the page; the name of its file as SVG
    title: str
    reading: str  # a sentence that says how to read it
    picture: altair.TopLevelMixin | None = None  # None where there is only the table
    table: Table | None = None
    marks: int = 0  # how many of its marks have a tooltip, when all that can be chosen is shown
    about: str = ""  # what the picture is of, below its title in a file of its own


@dataclass
class PageSection:
    anchor: str  # unique on the page
    title: str
    headline: str = ""  # the result, in a sentence
    charts: Sequence[Chart] = ()
    notes: Sequence[tuple[str, str]] = ()  # labels and texts
    sections: Sequence[PageSection] = ()
    folded: bool = False  # only title and headline are shown, until a reader opens it

    def whole(self) -> Iterator[PageSection]:
        """This section and all sections in it, in the order of the page."""
        yield self
        for section in self.sections:
            yield from section.whole()


@dataclass(frozen=True)
class Page:
    """Makes the anchors of its sections, charts and rows unique: equal ones are numbered."""

    title: str
    subtitle: str = ""
    sections: Sequence[PageSection] = ()

    def __post_init__(self) -> None:
        taken: set[str] = set()
        for section in (inner for outer in self.sections for inner in outer.whole()):
            rows = [row for chart in section.charts if chart.table for row in chart.table.rows if row.anchor]
            parts: list[PageSection | Chart | TableRow] = [section, *section.charts, *rows]
            for part in parts:
                number, name = 1, part.anchor
                while part.anchor in taken:
                    number += 1
                    part.anchor = f"{name}-{number}"
                taken.add(part.anchor)

    def charts(self) -> Iterator[Chart]:
        return (chart for outer in self.sections for section in outer.whole() for chart in section.charts)


Number = tuple[str, "str | Callable[[Any], str]"]
"""The key of a number, and the key of its text or the function that makes it."""
Columns = Mapping[str, "str | Number"]
"""By heading the key of a text, or of a number, whose column is aligned to the right."""


def table(rows: Sequence[Mapping[str, Any]], columns: Columns) -> Table:
    """A table of the same rows of data that a chart draws. A row may have an `anchor`."""

    def cell(row: Mapping[str, Any], column: str | Number) -> str | TableValue:
        if isinstance(column, str):
            return "" if row[column] is None else str(row[column])
        key, text = column
        return TableValue(row[text] if isinstance(text, str) else text(row[key]), row[key])

    numeric = frozenset(heading for heading, column in columns.items() if not isinstance(column, str))
    return Table(
        tuple(columns),
        [TableRow([cell(row, column) for column in columns.values()], row.get("anchor", "")) for row in rows],
        numeric,
    )


def anchor(*parts: str) -> str:
    """A name in letters, digits and dashes: `mla-decode-batch-64-vllm-amx`."""
    return "-".join(filter(None, (re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)))
