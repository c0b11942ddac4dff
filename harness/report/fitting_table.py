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
"""The least width of a column that wraps, in characters. Shorter texts take less, longer words more."""
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
    """A table of rows, each a mapping from headers to values. The most important columns come first: where
    there is no room, the last ones are left out, but never the first two. Columns of numbers are aligned at
    the right, those with long texts wrap."""
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


@dataclass(frozen=True)
class FittingTable:
    """A rich renderable. Columns whose cells are all empty are left out."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        filled = self._filled()
        widths = {i: self._least_width(i) for i in filled}  # by the place of the column
        shown, width = list(filled), options.max_width
        if not options.is_terminal:
            width = max(width, _total(widths, filled))
        spare = sorted((i for i in filled if self.columns[i].spare), key=lambda i: self.columns[i].spare)
        while spare and _total(widths, shown) > width:
            shown.remove(spare.pop())
        is_tight = _total(widths, shown) > width
        longest_words = {i: self._longest_word(i) for i in shown}
        while _total(widths, shown) > width:  # the widest column becomes narrower, if it can
            shrinkable = [i for i in shown if widths[i] > longest_words[i]]
            if not shrinkable:
                break
            widths[max(shrinkable, key=lambda i: widths[i])] -= 1
        width = max(width, _total(widths, shown))
        grid = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold",
                      border_style="dim")  # fmt: skip
        for i in shown:
            column = self.columns[i]
            grid.add_column(
                column.header, justify="right" if column.right else "left",
                no_wrap=not (column.wraps or is_tight), overflow="fold", min_width=widths[i],
                width=widths[i] if is_tight else None,
            )  # fmt: skip
        for row in self.rows:
            grid.add_row(*(row[i] for i in shown))
        yield from console.render(grid, options.update(max_width=width))
        if missing := [self.columns[i].header for i in filled if i not in shown]:
            yield Text(f"not shown for lack of width: {', '.join(missing)}", style="dim")

    def markdown(self) -> str:
        """All columns, as GitHub reads a table."""
        filled = self._filled()
        rows = [[str(row[i]).replace("|", "\\|").replace("\n", " ") for i in filled] for row in self.rows]
        alignments = ["right" if self.columns[i].right else "left" for i in filled]
        return tabulate(rows, [self.columns[i].header for i in filled], tablefmt="pipe",
                        disable_numparse=True, colalign=alignments)  # fmt: skip

    def _filled(self) -> list[int]:
        """The places of the columns that have a cell with text."""
        return [i for i in range(len(self.columns)) if any(len(row[i]) for row in self.rows)]

    def _least_width(self, i: int) -> int:
        """Characters of the column at a place, before anything is shrunk: the longest line, or for a column
        that wraps as much as it needs to be read well."""
        column = self.columns[i]
        cells = [column.header, *(str(row[i]) for row in self.rows)]
        longest = max(cell_len(line) for cell in cells for line in cell.split("\n"))
        if not column.wraps:
            return longest
        return max(self._longest_word(i), min(longest, MIN_WRAPPED))

    def _longest_word(self, i: int) -> int:
        cells = [self.columns[i].header, *(str(row[i]) for row in self.rows)]
        return max((cell_len(word) for cell in cells for word in cell.split()), default=0)


def _total(widths: Mapping[int, int], shown: Sequence[int]) -> int:
    """Characters of a line of the shown columns."""
    return sum(widths[i] for i in shown) + GAP * (len(shown) - 1)
