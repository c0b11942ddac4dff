"""A table that fits a terminal. Where it is too wide, first the least important columns are left out, then
cells are broken between words; a table that is still too wide stays so. In a file it has all columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from tabulate import tabulate

GAP = 2  # characters between columns
NUMBER = re.compile(r"[-+(]?\d.{,40}")  # a cell that is a number, perhaps with a unit or an interval
MIN_WRAPPED = 24
"""Characters that a column that wraps gets at first: fewer for shorter texts, more for a longer word."""
RULED = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)
"""A rule under the headers, with a gap between columns."""


@dataclass(frozen=True)
class Column:
    header: str
    right: bool = False  # whether cells are aligned at the right
    spare: int = 0
    """Where there is no room, the column with the highest number is left out first, one with 0 never."""
    wraps: bool = False  # whether long cells are broken into lines


Columns = dict[Column, Sequence[str | Text]]  # the cells of each column


def as_table(columns: Columns) -> FittingTable:
    """A table of columns, the first at the left."""
    return FittingTable(list(columns), list(zip(*columns.values(), strict=True)))


def table_of(rows: Sequence[Mapping[str, object]]) -> FittingTable:
    """A table of rows, which map headers to values. Where there is no room, columns are left out, from the
    last one to the third. Those of numbers are aligned at the right, those with long texts wrap."""
    headers = dict.fromkeys(header for row in rows for header in row)
    cells = [["" if row.get(header) is None else str(row[header]) for header in headers] for row in rows]
    columns = []
    for place, header in enumerate(headers):
        filled = [row[place] for row in cells if row[place]]
        is_short = all(len(cell) <= MIN_WRAPPED for cell in filled)
        is_numeric = all(NUMBER.fullmatch(cell) for cell in filled)
        if place == 0:  # names, which may begin with a digit
            is_numeric = all(cell.isdigit() for cell in filled)
        wraps = not is_numeric and not is_short
        columns.append(Column(header, right=is_numeric, wraps=wraps, spare=place if place > 1 else 0))
    return FittingTable(columns, cells)


class _FilledColumn:
    """A column with its cells, from the top. `width` is in characters and may be reduced. At first it is that
    of the longest line, or for a column that wraps as much as it needs to be read well."""

    def __init__(self, column: Column, cells: Sequence[str | Text]) -> None:
        self.column, self.cells = column, cells
        texts = [column.header, *map(str, cells)]
        self.longest_word = max((cell_len(word) for text in texts for word in text.split()), default=0)
        self.width = max(cell_len(line) for text in texts for line in text.split("\n"))
        if column.wraps:
            self.width = max(self.longest_word, min(self.width, MIN_WRAPPED))


@dataclass(frozen=True)
class FittingTable:
    """A rich renderable. Columns whose cells are all empty are left out."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        filled = self._filled()
        shown, width = list(filled), options.max_width
        if not options.is_terminal:
            width = max(width, _total(filled))
        spare = sorted((c for c in filled if c.column.spare), key=lambda c: c.column.spare)
        while spare and _total(shown) > width:
            shown.remove(spare.pop())
        is_tight = _total(shown) > width
        while _total(shown) > width:  # the widest column becomes narrower, if it can
            shrinkable = [c for c in shown if c.width > c.longest_word]
            if not shrinkable:
                break
            max(shrinkable, key=lambda c: c.width).width -= 1
        width = max(width, _total(shown))
        grid = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold",
                      border_style="dim")  # fmt: skip
        for c in shown:
            grid.add_column(
                c.column.header, justify="right" if c.column.right else "left",
                no_wrap=not (c.column.wraps or is_tight), overflow="fold", min_width=c.width,
                width=c.width if is_tight else None,
            )  # fmt: skip
        for row in zip(*(c.cells for c in shown), strict=True):
            grid.add_row(*row)
        yield from console.render(grid, options.update(max_width=width))
        if missing := [c.column.header for c in filled if c not in shown]:
            yield Text(f"not shown for lack of width: {', '.join(missing)}", style="dim")

    def markdown(self) -> str:
        """All columns, as GitHub reads a table."""
        filled = self._filled()
        cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in c.cells] for c in filled]
        alignments = ["right" if c.column.right else "left" for c in filled]
        return tabulate(list(zip(*cells, strict=True)), [c.column.header for c in filled], tablefmt="pipe",
                        disable_numparse=True, colalign=alignments)  # fmt: skip

    def _filled(self) -> list[_FilledColumn]:
        cells = [[row[place] for row in self.rows] for place in range(len(self.columns))]
        pairs = zip(self.columns, cells, strict=True)
        return [_FilledColumn(column, of_column) for column, of_column in pairs if any(map(len, of_column))]


def _total(shown: Sequence[_FilledColumn]) -> int:
    """Characters of a line of the shown columns."""
    return sum(c.width for c in shown) + GAP * (len(shown) - 1)
