"""AITER's tuned CSV files: how pandas reads a file, how AITER merges several, and what is wrong with them.

Source: `aiter/jit/core.py` `AITER_CONFIG.get_config_file`, `update_config_files`.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernels.tables import Problem, printable
from kernels.tables.files import Files, TableError

CONFIGS = "aiter/configs"
LINE = "_line"
"""A column of the recorded extracts: the line that a row has in AITER's own file."""

UNITS = {
    "gfx942": {20, 38, 40, 76, 80, 114, 152, 228, 304},
    "gfx950": {32, 64, 128, 256},
}
"""How many CUs GPUs have, whole or partitioned: MI300X, MI325X, MI300A, MI308X; MI350X, MI355X."""

GFX_OF_UNITS: Mapping[float, str] = {256: "gfx950", 80: "gfx942", 304: "gfx942"}
"""The gfx that AITER gives a row without one (`aiter/jit/utils/chip_info.py` `_LEGACY_CU_NUM_TO_GFX`)."""

ARCHITECTURE = re.compile(r"gfx(90a|94[0-2]|950|1[0-2]\d\d)")

MISSING = {"", "#N/A", "N/A", "NA", "n/a", "NULL", "null", "None", "nan", "NaN", "-nan", "-NaN", "<NA>"}
BOOLEANS = {"True": 1.0, "TRUE": 1.0, "true": 1.0, "False": 0.0, "FALSE": 0.0, "false": 0.0}


@dataclass(frozen=True)
class Family:
    """The files that AITER merges into one table."""

    name: str
    variable: str
    """The environment variable that names files to use instead of the package's."""
    numbers: tuple[str, ...]
    """The columns of the key that pandas must read as numbers."""
    texts: tuple[str, ...] = ()
    """The other columns of the key, without gfx."""

    @property
    def untuned(self) -> str:
        """The file of shapes to tune. Its columns are the key of a row."""
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


def packaged(files: Files, family: Family) -> list[str]:
    """The names of a family's files in the package: the default one, then those of model_configs/."""
    default = f"{CONFIGS}/{family.name}.csv"
    models = files.names(f"{CONFIGS}/model_configs/*{family.name}*.csv")
    return [default, *(name for name in models if "untuned" not in name.rsplit("/", 1)[-1])]


def number(cell: str) -> float | None:
    """A cell as pandas reads it in a column of numbers: NaN if it is empty, None if it is not a number."""
    cell = cell.strip()
    if cell in MISSING:
        return math.nan
    if cell in BOOLEANS:
        return BOOLEANS[cell]
    try:
        return float(cell) if cell.isascii() and "_" not in cell else None
    except ValueError:
        return None


@functools.cache
def number_or_nan(cell: str) -> float:
    value = number(cell)
    return math.nan if value is None else value


class Source:
    """A CSV file as pandas reads it."""

    def __init__(self, family: Family, file: str, text: str) -> None:
        self.family, self.file = family, file
        self.error = ""
        """Why pandas refuses the file; empty where it reads it."""
        self.columns: dict[str, int] = {}
        """The index of each column, by name."""
        self.rows: list[Row] = []
        if "\ufffd" in text:
            self.error = "is not UTF-8; pandas raises UnicodeDecodeError"
            return
        reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
        try:
            header = next((row for row in reader if row), None)
            if header is None:
                self.error = "is empty; pandas raises EmptyDataError"
                return
            for index, name in enumerate(header):
                self.columns.setdefault(name, index)
            for cells in reader:
                self._add(reader.line_num, cells, len(header))
        except csv.Error as error:
            self.error = f"line {reader.line_num} is not CSV: {error}"

    def _add(self, line: int, cells: list[str], width: int) -> None:
        if not "".join(cells).strip() and len(cells) < 2:
            return  # pandas skips a line of spaces, too
        if len(cells) > width:
            self.error = (
                f"line {line} has {len(cells)} cells under {width} columns; pandas raises ParserError"
            )
            return
        if LINE in self.columns and len(cells) > self.columns[LINE]:
            told = cells[self.columns[LINE]]
            line = int(told[:9]) if told.isdecimal() else line
        missing = width - len(cells)
        self.rows.append(Row(self, line, cells + [""] * missing, missing > 0))


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a table."""

    source: Source
    line: int
    cells: list[str]
    truncated: bool
    """Whether its line has too few cells."""

    @functools.cached_property
    def numbers(self) -> tuple[float, ...]:
        """The cells of the columns `Family.numbers`."""
        return tuple(number_or_nan(self.raw(column)) for column in self.source.family.numbers)

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The cells of the columns `Family.texts`."""
        return tuple(self.raw(column) for column in self.source.family.texts)

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

    @property
    def gfx(self) -> str | None:
        """The gfx that AITER finds or fills in; None where it fills in that of the GPU on which it runs."""
        gfx = self.raw("gfx", "")
        if "gfx" in self.source.columns and self.source.family is not MOE:
            return gfx
        return GFX_OF_UNITS.get(number_or_nan(self.raw("cu_num"))) if gfx in {*MISSING, "0"} else gfx

    def is_block_fp8(self, fp8: str) -> bool:
        """Whether the rest of the key, without act_type, is that of block FP8, as always for GEMM."""
        return not self.texts or (
            self.texts[1:] == ("torch.bfloat16", fp8, fp8, "QuantType.per_1x128")
            and self.numbers[6:] == (1, 0)
        )

    def raw(self, column: str, missing: str = "0") -> str:
        """A cell. missing: what AITER fills a column with that the file does not have"""
        index = self.source.columns.get(column)
        return missing if index is None else self.cells[index]

    def cell(self, column: str) -> str:
        """The text of a cell; empty where pandas reads it as missing or the file does not have the column."""
        cell = printable(self.raw(column, "").strip())
        return "" if cell in MISSING else cell

    def number(self, column: str) -> float | None:
        """A cell that is a finite number, else None."""
        value = number(self.cell(column))
        return value if value is not None and math.isfinite(value) else None

    @property
    def us(self) -> float | None:
        return self.number("us")


def rows_here(count: int) -> str:
    """Says how many rows a problem is about. Its line is that of the first one."""
    return "1 row" if count == 1 else f"{count} rows, the first here,"


class Table:
    """The merged files of a family."""

    def __init__(self, files: Files, family: Family, environment: Mapping[str, str]) -> None:
        self.family, self._files = family, files
        self.problems: list[Problem] = []
        """What is wrong with the files, on any GPU."""
        self.dead = ""
        """Why no look-up finds any row; empty where rows can be found."""
        self.raises = ""
        """Why AITER's first look-up raises; empty where it does not."""
        self._given = environment.get(family.variable, "")
        in_package = packaged(files, family)
        names = self._given.split(os.pathsep) if self._given else in_package
        self._merged = len(names) > 1
        self.sources = [source for name in names if (source := self._read(name))]
        count = "1 file" if len(self.sources) == 1 else f"{len(self.sources)} files"
        self.title = f"{family.name} ({count})"
        """The name of the table and how many files it has, for people."""
        if self._given:
            self._say_what_is_replaced(in_package)
        self.has_gfx, self._has_tag = (
            any(column in source.columns for source in self.sources) for column in ("gfx", "_tag")
        )
        for source in self.sources:
            self._check_columns(source)
        for column in family.numbers:
            self._check_numbers(column)
        lost = self._duplicates()
        self._rows = [row for source in self.sources for row in source.rows if row not in lost]

    def rows(self, arch: str) -> list[Row]:
        """The rows for an architecture, with any number of CUs, in the order of the merge."""
        if self.family is MOE:
            return [
                row for row in self._rows if row.gfx in (arch, None) and row.raw("_tag") != "flydsl_fallback"
            ]
        return [row for row in self._rows if not self.has_gfx or row.gfx in (arch, None)]

    def _read(self, name: str) -> Source | None:
        there = Path(name).exists() if self._given else self._files.has(name)
        if not there and self._merged:
            self._say(name or self.family.variable, 0, "does not exist: AITER merges the other files")
            return None
        try:
            text = self._files.text(Path(name) if self._given else name)
        except TableError as error:
            text = f"cannot be read ({error.reason}): AITER raises at the first look-up"
            self._say_that_it_raises(name, 0, text)
            return None
        source = Source(self.family, name, text)
        if source.error:
            self._say_that_it_raises(name, 0, f"{source.error}: AITER raises at the first look-up")
        elif not source.rows and LINE not in source.columns:
            self._say(name, 1, "has no rows")
        return source if source.columns else None

    # Problems

    def _say(self, file: str, line: int, text: str) -> None:
        self.problems.append(Problem(file, line, text))

    def _say_that_it_raises(self, file: str, line: int, text: str) -> None:
        self._say(file, line, text)
        self.raises = self.raises or f"AITER raises before this look-up: see {file}"

    def _say_what_is_replaced(self, hidden: list[str]) -> None:
        rows, is_extract = 0, False
        for name in hidden:
            with contextlib.suppress(TableError):
                lines = self._files.text(name).split("\n") if self._files.has(name) else [""]
                rows += max(0, len(lines) - 2)
                is_extract |= LINE in lines[0].split(",")
        many = "" if is_extract else f", {rows} rows,"  # an extract does not have all rows of a file
        self._say(
            self.family.variable,
            0,
            f"replaces the {len(hidden)} files of the package{many} by {self._given}: "
            "to add to them, name them too",
        )

    def _check_columns(self, source: Source) -> None:
        if source.error:  # pandas raises before
            return
        count = len(source.rows)
        absent = [c for c in (*self.family.numbers, *self.family.texts) if c not in source.columns]
        text = ""
        if absent:
            text = f"has no column {', '.join(absent)}: its {count} rows are never found"
        elif "gfx" in source.columns:
            self._check_gpus(source)
        elif self.family is MOE:
            units = {row.units for row in source.rows} - set(GFX_OF_UNITS)
            if units:
                numbers = ", ".join(f"{unit:g}" for unit in sorted(units))
                text = f"has no column gfx, and AITER knows none of cu_num {numbers}"
        elif count and self.has_gfx:
            text = "has no column gfx: AITER takes it from cu_num, 80 and 304 or 256"
        elif count:
            text = "has no column gfx: a row is found by its number of CUs on any GPU"
        if text:
            self._say(source.file, 1, text)

    def _check_gpus(self, source: Source) -> None:
        def is_odd(row: Row) -> bool:
            gfx = row.raw("gfx")
            if gfx in MISSING or (self.family is MOE and gfx == "0"):
                return False
            return not ARCHITECTURE.fullmatch(gfx) or (gfx in UNITS and row.units not in UNITS[gfx])

        if bad := [row for row in source.rows if is_odd(row)]:
            gfx, units = (bad[0].raw(column)[:20] for column in ("gfx", "cu_num"))
            text = f"{rows_here(len(bad))} for {gfx} with {units} CUs, and there is no such GPU"
            self._say(source.file, bad[0].line, printable(text))

    def _check_numbers(self, column: str) -> None:
        """Finds cells by which pandas does not read a column as numbers."""
        rows = [row for source in self.sources for row in source.rows]
        kinds: dict[str, Row] = {}
        for row in rows:
            cell = row.raw(column)
            value = number(cell)
            if value is None:
                kinds.setdefault("text", row)
            elif not math.isnan(value):
                kinds.setdefault("bool" if cell.strip() in BOOLEANS else "number", row)
        if "text" in kinds or len(kinds) > 1:
            row = kinds.get("text") or kinds["bool"]
            file, line, cell = row.source.file, row.line, row.raw(column)
            self.dead = f"{file}:{line}: {column} is {cell[:20]!r}, so no row is found"
            self._say(
                file,
                line,
                f"{column} is {cell[:20]!r}: pandas reads the whole column as text, "
                f"and none of the {len(rows)} rows of {self.family.name} is found",
            )

    def _duplicates(self) -> set[Row]:
        """The rows that lose to a faster row with the same key."""
        lost: set[Row] = set()
        moe = self.family is MOE
        if moe and not (self._merged and self._files.has(self.family.untuned)):
            return lost  # AITER warns and keeps the first
        then = "pandas raises ValueError at the first look-up"
        if self._merged:
            then = "AITER keeps the fastest, rewrites its files and raises RuntimeError"
        best: dict[tuple[object, ...], Row] = {}
        for source in self.sources:
            if source.error:  # pandas raises before
                continue
            whole: set[tuple[str, ...]] = set()
            lines = []
            for row in source.rows:
                if not self._merged:
                    if tuple(row.cells) in whole:
                        continue  # AITER drops equal rows if it merges nothing
                    whole.add(tuple(row.cells))
                tag = row.raw("_tag", "0" if self._has_tag else "") if moe else ""
                key = row.numbers, row.texts, row.gfx if self.has_gfx else "", tag
                before = best.setdefault(key, row)
                if before is not row:
                    is_faster = _time(row) < _time(before)
                    best[key] = row if is_faster else before
                    lost.add(before if is_faster else row)
                    lines.append(row.line)
            if lines:
                text = f"{rows_here(len(lines))} with a key that another row has: {then}"
                self._say_that_it_raises(source.file, lines[0], text)
        return lost


def _time(row: Row) -> float:
    return math.inf if row.us is None else row.us
