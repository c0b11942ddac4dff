"""What a page shows: sections of charts, each with the table of its numbers; independent of HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair


@dataclass(frozen=True)
class TableValue:
    """A cell of a table."""

    text: str
    """As people read it."""
    order: float | str | None = None
    """What the column is sorted by, and what a download has; None: the text."""


@dataclass(frozen=True)
class TableRow:
    cells: Sequence[str | TableValue]
    anchor: str = ""
    """Where a link finds the row, unique on the page; empty: it has none."""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    """Headings, with units."""
    rows: Sequence[TableRow]
    numeric: frozenset[str] = frozenset()
    """Columns that are aligned to the right."""


@dataclass(frozen=True)
class Chart:
    """A picture and its numbers."""

    anchor: str
    """Unique on the page; the name of its file as SVG."""
    title: str
    reading: str
    """A sentence that says how to read it."""
    picture: altair.TopLevelMixin | None = None
    """None where there is only the table."""
    table: Table | None = None
    marks: int = 0
    """How many of its marks have a tooltip."""


@dataclass(frozen=True)
class PageSection:
    anchor: str
    title: str
    headline: str = ""
    """The result, in a sentence."""
    charts: Sequence[Chart] = ()
    notes: Sequence[tuple[str, str]] = ()
    """Labels and texts."""
    sections: Sequence[PageSection] = ()


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str = ""
    sections: Sequence[PageSection] = field(default_factory=list)

    def charts(self) -> Iterator[Chart]:
        """All charts, in the order of the page."""
        waiting = list(reversed(self.sections))
        while waiting:
            section = waiting.pop()
            yield from section.charts
            waiting += reversed(section.sections)


Number = tuple[str, "str | Callable[[Any], str]"]
"""The key of a number, and the key of its text or the function that makes it."""
Columns = Mapping[str, "str | Number"]
"""By heading the key of a text, or of a number, whose column is aligned to the right."""


def table(rows: Sequence[Mapping[str, Any]], columns: Columns) -> Table:
    """A table of the same rows of data that a chart draws. A row may have an `anchor`."""

    def cell(row: Mapping[str, Any], column: str | Number) -> str | TableValue:
        if isinstance(column, str):
            return str(row[column])
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


def distinct(sections: Sequence[PageSection], taken: set[str] | None = None) -> list[PageSection]:
    """The sections with anchors that are unique on the page: equal ones are numbered."""
    taken = set() if taken is None else taken

    def own(name: str) -> str:
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name}-{number}"
        taken.add(free)
        return free

    def of_chart(chart: Chart) -> Chart:
        name, table = own(chart.anchor), chart.table
        if table is not None:
            rows = [replace(row, anchor=own(row.anchor)) if row.anchor else row for row in table.rows]
            table = replace(table, rows=rows)
        return replace(chart, anchor=name, table=table)

    return [
        replace(
            section,
            anchor=own(section.anchor),
            charts=[of_chart(chart) for chart in section.charts],
            sections=distinct(section.sections, taken),
        )
        for section in sections
    ]
