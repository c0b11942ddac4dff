"""What a page shows: sections of charts, each with the table of its numbers; independent of HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import altair


@dataclass(frozen=True)
class TableValue:
    text: str  # as people read it
    order: float | str | None = None  # what a reader sorts the column by and downloads; None: the text


@dataclass
class TableRow:
    cells: Sequence[str | TableValue]
    anchor: str = ""  # where a link finds the row, unique on the page; empty: it has none
    link: str = ""  # the anchor of the section that the first cell names; empty: none


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]  # headings, with units
    rows: Sequence[TableRow]
    numeric: Set[str] = frozenset()  # columns that are aligned to the right


@dataclass
class Chart:
    anchor: str  # unique on the page; the name of its file as SVG
    title: str
    reading: str  # sentences that say how to read it
    picture: altair.TopLevelMixin | None = None  # None where there is only the table
    table: Table | None = None
    marks: int = 0  # for tests: how many tooltips the picture has when all of its rows are chosen
    about: str = ""  # what the picture shows: stands below the title where the picture is a file of its own


@dataclass
class PageSection:
    anchor: str  # unique on the page
    title: str
    headline: str = ""  # the result, in a sentence
    charts: Sequence[Chart] = ()
    notes: Sequence[tuple[str, str]] = ()  # labels and texts
    sections: Sequence[PageSection] = ()
    folded: bool = False  # only title and headline are shown until a reader opens it

    def with_inner(self) -> Iterator[PageSection]:
        """Yields this section and all sections in it, in the order of the page."""
        yield self
        for section in self.sections:
            yield from section.with_inner()


@dataclass(frozen=True)
class Page:
    """Its constructor makes the anchors of sections, charts and rows unique: equal ones are numbered."""

    title: str
    subtitle: str = ""
    sections: Sequence[PageSection] = ()

    def __post_init__(self) -> None:
        taken: set[str] = set()
        for section in self.all_sections():
            rows = [row for chart in section.charts if chart.table for row in chart.table.rows if row.anchor]
            parts: list[PageSection | Chart | TableRow] = [section, *section.charts, *rows]
            for part in parts:
                number, name = 1, part.anchor
                while part.anchor in taken:
                    number += 1
                    part.anchor = f"{name}-{number}"
                taken.add(part.anchor)

    def all_sections(self) -> Iterator[PageSection]:
        return (inner for section in self.sections for inner in section.with_inner())

    def charts(self) -> Iterator[Chart]:
        return (chart for section in self.all_sections() for chart in section.charts)


Number = tuple[str, "str | Callable[[Any], str]"]
"""A column of numbers: the number's key, by which readers sort; and the key of its text, or what makes it."""
Columns = Mapping[str, "str | Number"]
"""Heading of a column -> the key of its text, or a Number. Columns of numbers are aligned to the right."""


def table(rows: Sequence[Mapping[str, Any]], columns: Columns) -> Table:
    """A table of rows of data, the same that a chart draws. A row may have an `anchor`."""

    def cell(row: Mapping[str, Any], column: str | Number) -> str | TableValue:
        if isinstance(column, str):
            return "" if row[column] is None else str(row[column])
        number, text = column
        return TableValue(row[text] if isinstance(text, str) else text(row[number]), row[number])

    numeric = {heading for heading, column in columns.items() if not isinstance(column, str)}
    table_rows = [TableRow([cell(row, c) for c in columns.values()], row.get("anchor", "")) for row in rows]
    return Table(tuple(columns), table_rows, numeric)


def anchor(*parts: str) -> str:
    """A name of letters, digits and dashes: `mla-decode-batch-64-vllm-amx`. Empty parts are left out."""
    names = [re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts]
    return "-".join(filter(None, names))
