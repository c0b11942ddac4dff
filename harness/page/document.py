"""What a page shows: sections of charts, each with the table of its numbers. Says nothing of HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import altair


@dataclass(frozen=True)
class TableValue:
    """A cell of a table.

    text:  as people read it
    order: what the column is sorted by, and what a download holds; None: the text
    """

    text: str
    order: float | str | None = None


@dataclass(frozen=True)
class TableRow:
    """anchor: by which a link finds it, unique on the page; empty: it has none"""

    cells: Sequence[str | TableValue]
    anchor: str = ""


@dataclass(frozen=True)
class Table:
    """columns: their headings, with units; numeric ones stand to the right"""

    columns: Sequence[str]
    rows: Sequence[TableRow]
    numeric: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Chart:
    """A picture and its numbers.

    anchor:  unique on the page; the name of its file as SVG
    reading: a sentence that says how to read it
    picture: None where there is only the table
    marks:   how many of its marks have a tooltip
    """

    anchor: str
    title: str
    reading: str
    picture: altair.TopLevelMixin | None = None
    table: Table | None = None
    marks: int = 0


@dataclass(frozen=True)
class PageSection:
    """headline: what it comes to, in a sentence; notes: what there is to know of it, label and text"""

    anchor: str
    title: str
    headline: str = ""
    charts: Sequence[Chart] = ()
    notes: Sequence[tuple[str, str]] = ()
    sections: Sequence[PageSection] = ()


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str = ""
    sections: Sequence[PageSection] = field(default_factory=list)

    def charts(self) -> Iterator[Chart]:
        """All, in the order of the page."""
        waiting = list(reversed(self.sections))
        while waiting:
            section = waiting.pop()
            yield from section.charts
            waiting += reversed(section.sections)


def anchor(*parts: str) -> str:
    """Letters, digits and dashes, of what people call it: `mla-decode-batch-64-vllm-amx`."""
    return "-".join(filter(None, (re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)))


def distinct(sections: Sequence[PageSection], taken: set[str] | None = None) -> list[PageSection]:
    """With anchors that are each on the page once: numbered where two would be alike."""
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
