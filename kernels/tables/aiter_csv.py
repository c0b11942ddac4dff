"""AITER's tuned CSV files: which families there are, and how pandas reads a file."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass

from kernels.tables import printable

CONFIGS = "aiter/configs"
LINE = "_line"
"""The column of recorded extracts that holds the line that a row has in AITER's own file."""

UNITS = {
    "gfx942": {20, 38, 40, 76, 80, 114, 152, 228, 304},
    "gfx950": {32, 64, 128, 256},
}
"""How many CUs GPUs have, whole and in partitions: MI300X, MI325X, MI300A, MI308X; MI350X, MI355X."""

MISSING = {"", "#N/A", "N/A", "NA", "n/a", "NULL", "null", "None", "nan", "NaN", "-nan", "-NaN", "<NA>"}
BOOLEANS = {"True": 1.0, "TRUE": 1.0, "true": 1.0, "False": 0.0, "FALSE": 0.0, "false": 0.0}


@dataclass(frozen=True)
class Family:
    """The files that AITER merges into one table.

    variable: the environment variable that names files in their place
    numbers:  the columns of the key that pandas must read as numbers
    texts:    the other columns of the key, without gfx
    """

    name: str
    variable: str
    numbers: tuple[str, ...]
    texts: tuple[str, ...] = ()

    @property
    def untuned(self) -> str:
        """The file of shapes to tune, whose columns are the key of a row."""
        return f"{CONFIGS}/{'untuned'.join(self.name.rsplit('tuned', 1))}.csv"


GEMM = Family("a8w8_blockscale_tuned_gemm", "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE", ("cu_num", "M", "N", "K"))
PRESHUFFLED = Family(
    "a8w8_blockscale_bpreshuffle_tuned_gemm",
    "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE",
    ("cu_num", "M", "N", "K"),
)
MOE = Family(
    "tuned_fmoe",
    "AITER_CONFIG_FMOE",
    ("cu_num", "token", "model_dim", "inter_dim", "expert", "topk", "use_g1u1", "doweight_stage1"),
    ("act_type", "dtype", "q_dtype_a", "q_dtype_w", "q_type"),
)


def number(cell: str) -> float | None:
    """A cell as pandas reads it in a column of numbers: NaN where it is empty, None where it is no number."""
    cell = cell.strip()
    if cell in MISSING:
        return math.nan
    if cell in BOOLEANS:
        return BOOLEANS[cell]
    try:
        return float(cell) if cell.isascii() and "_" not in cell else None
    except ValueError:
        return None


class _Numbers(dict[str, float]):
    """The number of each cell, parsed once; NaN where the cell is no number."""

    def __missing__(self, cell: str) -> float:
        value = number(cell)
        self[cell] = math.nan if value is None else value
        return self[cell]


NUMBERS = _Numbers()


class Source:
    """A CSV file as pandas reads it.

    columns:   the place of each column, by name
    rows:      (line, cells) of each row
    truncated: the lines of rows with too few cells
    ends:      whether the file ends with the end of a line
    error:     why pandas refuses the file; empty where it reads it
    """

    def __init__(self, file: str, text: str) -> None:
        self.file, self.error = file, ""
        self.truncated: set[int] = set()
        self.columns: dict[str, int] = {}
        self.rows: list[tuple[int, list[str]]] = []
        self.ends = text.endswith("\n")
        if "\ufffd" in text:
            self.error = "is no UTF-8; pandas raises UnicodeDecodeError"
            return
        reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
        try:
            header = next((row for row in reader if row), None)
            if header is None:
                self.error = "is empty; pandas raises EmptyDataError"
                return
            for place, name in enumerate(header):
                self.columns.setdefault(name, place)
            width = len(header)
            for row in reader:
                if not "".join(row).strip() and len(row) < 2:
                    continue  # pandas leaves out a line of spaces, too
                if len(row) > width:
                    self.error = (
                        f"line {reader.line_num} has {len(row)} cells under {width} columns; "
                        "pandas raises ParserError"
                    )
                    continue
                if len(row) < width:
                    self.truncated.add(reader.line_num)
                    row += [""] * (width - len(row))
                self.rows.append((reader.line_num, row))
        except csv.Error as error:
            self.error = f"line {reader.line_num} is no CSV: {error}"
        if LINE in self.columns:
            place = self.columns[LINE]
            self.rows = [
                (int(row[place][:9]) if row[place].isdecimal() else line, row) for line, row in self.rows
            ]

    def cells(self, column: str, missing: str = "0") -> list[str]:
        """The cell of each row; `missing` where the file lacks the column, which AITER fills with 0."""
        place = self.columns.get(column)
        if place is None:
            return [missing] * len(self.rows)
        return [row[place] for _, row in self.rows]


@dataclass(frozen=True)
class Row:
    """A row of a merged table. numbers, texts: its cells in the columns that Family lists"""

    source: Source
    line: int
    cells: list[str]
    numbers: tuple[float, ...]
    texts: tuple[str, ...]

    @property
    def units(self) -> float:
        return self.numbers[0]

    @property
    def m(self) -> float:
        return self.numbers[1]

    @property
    def shape(self) -> tuple[float, ...]:
        """(N, K), or (model_dim, inter_dim, expert, topk)."""
        return self.numbers[2:6]

    def is_block_fp8(self, fp8: str) -> bool:
        """Whether the rest of the key, without act_type, is that of block FP8. In a table of GEMM it always
        is."""
        return not self.texts or (
            self.texts[1:] == ("torch.bfloat16", fp8, fp8, "QuantType.per_1x128")
            and self.numbers[6:] == (1, 0)
        )

    def cell(self, column: str) -> str:
        """The text of a cell; empty where pandas reads it as missing or the file lacks the column."""
        place = self.source.columns.get(column)
        cell = "" if place is None else printable(self.cells[place].strip())
        return "" if cell in MISSING else cell

    def number(self, column: str) -> float | None:
        """A cell that is a finite number, else None."""
        value = number(self.cell(column))
        return value if value is not None and math.isfinite(value) else None

    @property
    def us(self) -> float | None:
        return self.number("us")

    @property
    def truncated(self) -> bool:
        return self.line in self.source.truncated


def rows_here(count: int) -> str:
    """How many rows a problem is about, whose line is that of the first one."""
    return "1 row" if count == 1 else f"{count} rows, the first here,"
