"""AITER's tuned CSV files, read with pandas and merged as AITER does it, and what is wrong with them.

Source: `aiter/jit/core.py` `AITER_CONFIG.get_config_file`, `update_config_files`.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kernels.tables import Problem
from kernels.tables.files import Files, TableError

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIGS = "aiter/configs"
LINE = "_line"
"""A column of the recorded extracts: the line that a row has in AITER's own file."""
SHORT = "_short"

GFX_OF_UNITS: Mapping[float, str] = {256: "gfx950", 80: "gfx942", 304: "gfx942"}
"""The gfx that AITER gives a row without one (`aiter/jit/utils/chip_info.py` `_LEGACY_CU_NUM_TO_GFX`)."""


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


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a table."""

    family: Family
    file: str
    line: int
    cells: Mapping[str, str]
    """The texts of its file, by column; empty where pandas reads a cell as missing."""
    truncated: bool
    """Whether its line has too few cells."""
    numbers: tuple[float, ...]
    """The values of the columns `Family.numbers`; NaN where one is missing or is no number."""

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        return tuple(map(self.cell, self.family.texts))

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
        if self.family is not MOE and "gfx" in self.cells:
            return self.cells["gfx"]
        gfx = self.cell("gfx")
        return GFX_OF_UNITS.get(self.units) if gfx in ("", "0") else gfx

    def is_block_fp8(self, fp8: str) -> bool:
        """Whether the rest of the key, without act_type, is that of block FP8, as always for GEMM."""
        return not self.texts or (
            self.texts[1:] == ("torch.bfloat16", fp8, fp8, "QuantType.per_1x128")
            and self.numbers[6:] == (1, 0)
        )

    def cell(self, column: str) -> str:
        """The text of a cell; empty where it is missing, or the file does not have the column."""
        return self.cells.get(column, "").strip()

    def number(self, column: str) -> float | None:
        """A cell that is a finite number, else None."""
        try:
            value = float(self.cell(column))
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    @property
    def us(self) -> float | None:
        return self.number("us")


class _File(NamedTuple):
    """A file of a family."""

    name: str
    typed: DataFrame
    """The columns `Family.numbers`, as pandas reads them."""
    texts: DataFrame
    """All columns as texts, with LINE, and in SHORT whether the line has too few cells."""


def rows_here(count: int) -> str:
    """Says how many rows a problem is about. Its line is that of the first one."""
    return "1 row" if count == 1 else f"{count} rows, the first here,"


def _lines(text: str, count: int) -> tuple[list[int], list[bool]]:
    """For each of `count` rows of a CSV the number of its line, and whether it has too few cells. The numbers
    are 0 where lines and rows cannot be matched."""
    try:
        reader = csv.reader(io.StringIO(text))
        lines = []
        for cells in reader:
            if len(cells) > 1 or "".join(cells).strip(" \t"):  # pandas leaves out lines of blanks
                lines.append((reader.line_num, len(cells)))
    except csv.Error:
        lines = []
    if len(lines) != count + 1:
        return [0] * count, [False] * count
    return [number for number, _ in lines[1:]], [cells < lines[0][1] for _, cells in lines[1:]]


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
        read = [file for name in names if (file := self._read(name))]
        count = "1 file" if len(read) == 1 else f"{len(read)} files"
        self.title = f"{family.name} ({count})"
        """The name of the table and how many files it has, for people."""
        if self._given:
            text = f"replaces the {len(in_package)} files of the package by {self._given}"
            self._say(family.variable, 0, f"{text}: to add to them, name them too")
        self.has_gfx = any("gfx" in file.texts for file in read)
        for column in family.numbers:
            self._check_numbers(column, [file for file in read if len(file.typed)])
        rows = [row for file in read for row in self._rows_of(file)]
        lost = self._duplicates(rows)
        self._rows = [row for row in rows if row not in lost]

    def rows(self, arch: str) -> list[Row]:
        """The rows for an architecture, with any number of CUs, in the order of the merge."""
        if self.family is MOE:
            return [
                row for row in self._rows if row.gfx in (arch, None) and row.cell("_tag") != "flydsl_fallback"
            ]
        return [row for row in self._rows if not self.has_gfx or row.gfx in (arch, None)]

    def _read(self, name: str) -> _File | None:
        """Reads a file as AITER does; None where AITER gets nothing from it."""
        import pandas

        there = Path(name).exists() if self._given else self._files.has(name)
        if not there and self._merged:
            self._say(name or self.family.variable, 0, "does not exist: AITER merges the other files")
            return None
        try:
            text = self._files.text(Path(name) if self._given else name)
            if "\ufffd" in text:
                raise TableError("not UTF-8")
            typed, texts = (
                pandas.read_csv(io.StringIO(text), dtype=dtype, low_memory=False) for dtype in (None, "str")
            )
        except ValueError as error:  # of pandas, or a TableError
            reason = error.reason if isinstance(error, TableError) else " ".join(str(error).split())
            self._say_that_it_raises(name, 0, f"cannot be read ({reason}): AITER raises at the first look-up")
            return None
        if absent := [c for c in (*self.family.numbers, *self.family.texts) if c not in typed]:
            self._say(name, 1, f"has no column {', '.join(absent)}: its {len(typed)} rows are never found")
        numbers, short = _lines(text, len(typed))
        if LINE in texts:
            numbers = pandas.to_numeric(texts[LINE], errors="coerce").fillna(0).astype(int).tolist()
        if any(short):
            first, count = numbers[short.index(True)], sum(short)
            self._say(name, first, f"{rows_here(count)} cut short: AITER reads the missing cells as nan")
        texts = texts.fillna("").assign(**{LINE: numbers, SHORT: short})
        # AITER fills a column that a file does not have with 0.
        return _File(name, typed.reindex(columns=self.family.numbers, fill_value=0), texts)

    def _rows_of(self, file: _File) -> Iterator[Row]:
        from pandas import to_numeric

        columns = [to_numeric(file.typed[column], errors="coerce") for column in self.family.numbers]
        numbers = zip(*(column.astype(float) for column in columns), strict=True)
        for cells, values in zip(file.texts.to_dict("records"), numbers, strict=True):
            yield Row(self.family, file.name, cells.pop(LINE), cells, cells.pop(SHORT), values)

    # Problems

    def _say(self, file: str, line: int, text: str) -> None:
        self.problems.append(Problem(file, line, text))

    def _say_that_it_raises(self, file: str, line: int, text: str) -> None:
        self._say(file, line, text)
        self.raises = self.raises or f"AITER raises before this look-up: see {file}"

    def _check_numbers(self, column: str, read: Sequence[_File]) -> None:
        """Finds the cell by which pandas does not read a column of the merged files as numbers."""
        from pandas import concat, to_numeric
        from pandas.api.types import is_numeric_dtype

        if not read or is_numeric_dtype(concat([file.typed[column] for file in read])):
            return
        count = sum(len(file.typed) for file in read)
        for file in read:
            texts = file.texts.get(column, default=file.typed[column])
            odd = to_numeric(texts, errors="coerce").isna() & (texts != "")
            if odd.any():
                line, cell = (file.texts[odd][name].iloc[0] for name in (LINE, column))
                self.dead = f"{file.name}:{line}: {column} is {cell!r}, so no row is found"
                told = f"{column} is {cell!r}: pandas reads the whole column as text"
                found = f"none of the {count} rows of {self.family.name} is found"
                self._say(file.name, line, f"{told}, and {found}")
                return

    def _duplicates(self, rows: Sequence[Row]) -> set[Row]:
        """The rows that lose to a faster row with the same key."""
        moe = self.family is MOE
        if moe and not (self._merged and self._files.has(self.family.untuned)):
            return set()  # AITER warns and keeps the first
        then = "pandas raises ValueError at the first look-up"
        if self._merged:
            then = "AITER keeps the fastest, rewrites its files and raises RuntimeError"
        best: dict[tuple[object, ...], Row] = {}
        lost: set[Row] = set()
        lines: dict[str, list[int]] = defaultdict(list)
        for row in rows:
            tag = row.cells.get("_tag", "0") if moe else ""
            key = row.numbers, row.texts, row.gfx if self.has_gfx else "", tag
            before = best.setdefault(key, row)
            is_same = not self._merged and row.cells == before.cells  # AITER drops it if it merges nothing
            if before is not row and not is_same:
                best[key] = min(before, row, key=_time)
                lost |= {before, row} - {best[key]}
                lines[row.file].append(row.line)
        for file, several in lines.items():
            text = f"{rows_here(len(several))} with a key that another row has: {then}"
            self._say_that_it_raises(file, several[0], text)
        return lost


def _time(row: Row) -> float:
    return math.inf if row.us is None else row.us
