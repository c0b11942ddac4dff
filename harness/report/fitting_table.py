"""A table that fits a terminal: where there is no room, the least important columns are left out, then cells
are broken between words; else the table is wider. In a file it may be wider, and has all columns."""

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

GAP = 2
NUMBER = re.compile(r"[-+(]?\d.{,40}")  # a cell that is a number, perhaps with a unit or an interval
LEAST = 24  # the least width of a wrapped column, unless its text is shorter; its longest word always fits
RULED = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)
"""A rule under the headers, with a gap between columns."""


@dataclass(frozen=True)
class Column:
    header: str
    right: bool = False  # whether cells are aligned at the right
    spare: int = 0
    """Where there is no room, the column with the highest number is left out first; 0 is never left out."""
    wraps: bool = False  # whether long cells are broken into lines


Columns = dict[Column, Sequence[str | Text]]  # the cells of each column


def as_table(columns: Columns) -> FittingTable:
    return FittingTable(list(columns), list(zip(*columns.values(), strict=True)))


def table_of(rows: Sequence[Mapping[str, object]]) -> FittingTable:
    """Rows by the names of their columns, which begin with the most important one: where there is no room,
    the last are left out, the first two never. Numbers are aligned at the right, long texts wrap."""
    names = dict.fromkeys(name for row in rows for name in row)
    cells = [["" if row.get(name) is None else str(row[name]) for name in names] for row in rows]
    columns = []
    for place, name in enumerate(names):
        filled = [row[place] for row in cells if row[place]]
        short = all(len(cell) <= LEAST for cell in filled)
        numbers = all(NUMBER.fullmatch(cell) if place else cell.isdigit() for cell in filled)
        spare = place if place > 1 else 0
        columns.append(Column(name, right=numbers, wraps=not (numbers or short), spare=spare))
    return FittingTable(columns, cells)


@dataclass(frozen=True)
class FittingTable:
    """A rich renderable. Columns whose cells are all empty are left out."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        filled = [i for i in range(len(self.columns)) if any(len(row[i]) for row in self.rows)]
        widths = {i: self._least_width(i) for i in filled}
        shown, width = list(filled), options.max_width
        if not options.is_terminal:
            width = max(width, _total(widths, filled))
        spare = sorted((i for i in filled if self.columns[i].spare), key=lambda i: self.columns[i].spare)
        while spare and _total(widths, shown) > width:
            shown.remove(spare.pop())
        tight, words = _total(widths, shown) > width, {i: self._longest_word(i) for i in shown}
        while _total(widths, shown) > width and (wide := [i for i in shown if widths[i] > words[i]]):
            widths[max(wide, key=lambda i: widths[i])] -= 1
        width = max(width, _total(widths, shown))
        grid = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold",
                      border_style="dim")  # fmt: skip
        for i in shown:
            column = self.columns[i]
            grid.add_column(
                column.header,
                justify="right" if column.right else "left",
                no_wrap=not (column.wraps or tight),
                overflow="fold",
                min_width=widths[i],
                width=widths[i] if tight else None,
            )
        for row in self.rows:
            grid.add_row(*(row[i] for i in shown))
        yield from console.render(grid, options.update(max_width=width))
        if missing := [self.columns[i].header for i in filled if i not in shown]:
            yield Text(f"not shown for lack of width: {', '.join(missing)}", style="dim")

    def markdown(self) -> str:
        """All columns, as GitHub reads a table."""
        filled = [i for i in range(len(self.columns)) if any(len(row[i]) for row in self.rows)]
        columns = [self.columns[i] for i in filled]
        return tabulate(
            [[str(row[i]).replace("|", "\\|").replace("\n", " ") for i in filled] for row in self.rows],
            [column.header for column in columns],
            tablefmt="pipe",
            disable_numparse=True,
            colalign=["right" if column.right else "left" for column in columns],
        )

    def _least_width(self, i: int) -> int:
        column = self.columns[i]
        cells = [column.header, *(str(row[i]) for row in self.rows)]
        longest = max(cell_len(line) for cell in cells for line in cell.split("\n"))
        if not column.wraps:
            return longest
        return max(self._longest_word(i), min(longest, LEAST))

    def _longest_word(self, i: int) -> int:
        cells = [self.columns[i].header, *(str(row[i]) for row in self.rows)]
        return max(cell_len(word) for cell in cells for word in (cell.split() or [""]))


def _total(widths: Mapping[int, int], shown: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + GAP * (len(shown) - 1)
