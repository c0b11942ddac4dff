"""AITER's tuned CSVs: which there are, and a file of them read as pandas reads it."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass

from kernels.tables import printable

CONFIGS = "aiter/configs"
LINE = "_line"
"""A column of the recorded extracts: the row's line in AITER's own file."""

UNITS = {
    "gfx942": {20, 38, 40, 76, 80, 114, 152, 228, 304},
    "gfx950": {32, 64, 128, 256},
}
"""CUs of MI300X, MI325X, MI300A, MI308X; of MI350X, MI355X; whole and in partitions."""

MISSING = {"", "#N/A", "N/A", "NA", "n/a", "NULL", "null", "None", "nan", "NaN", "-nan", "-NaN", "<NA>"}
BOOLEANS = {"True": 1.0, "TRUE": 1.0, "true": 1.0, "False": 0.0, "FALSE": 0.0, "false": 0.0}


@dataclass(frozen=True)
class Family:
    """Files that AITER merges into one table.

    variable: the environment variable whose files replace them
    numbers:  columns of the key that pandas must read as numbers
    texts:    the other columns of the key, gfx left out
    """

    name: str
    variable: str
    numbers: tuple[str, ...]
    texts: tuple[str, ...] = ()

    @property
    def untuned(self) -> str:
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
    """A cell as pandas reads it in a column of numbers; NaN where it is missing, None where it is none."""
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
    """Of cells, each parsed once; NaN where a cell is none."""

    def __missing__(self, cell: str) -> float:
        value = number(cell)
        self[cell] = math.nan if value is None else value
        return self[cell]


NUMBERS = _Numbers()


class Source:
    """A CSV: `columns` by their place, `rows` with the line of each; `error` where pandas refuses it."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.error, self.truncated = file, "", []
        self.columns: dict[str, int] = {}
        self.rows: list[tuple[int, list[str]]] = []
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
                    self.truncated.append(reader.line_num)
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
        """Of each row; `missing` where the file lacks the column: 0, as AITER fills it."""
        place = self.columns.get(column)
        if place is None:
            return [missing] * len(self.rows)
        return [row[place] for _, row in self.rows]


@dataclass(frozen=True)
class Row:
    """A row of a merged table."""

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

    def is_asked(self, fp8: str) -> bool:
        """Whether the rest of the key, act_type aside, is that of FP8 in blocks; a GEMM's always is."""
        return not self.texts or (
            self.texts[1:] == ("torch.bfloat16", fp8, fp8, "QuantType.per_1x128")
            and self.numbers[6:] == (1, 0)
        )

    def cell(self, column: str) -> str:
        """Its text; empty where it is missing or the file lacks the column."""
        place = self.source.columns.get(column)
        cell = "" if place is None else printable(self.cells[place].strip())
        return "" if cell in MISSING else cell

    def number(self, column: str) -> float | None:
        value = number(self.cell(column))
        return value if value is not None and math.isfinite(value) else None

    @property
    def us(self) -> float | None:
        return self.number("us")

    @property
    def truncated(self) -> bool:
        return self.line in self.source.truncated


def rows_here(count: int) -> str:
    """Of rows whose first one is in the line of the message."""
    return "1 row" if count == 1 else f"{count} rows, the first here,"
