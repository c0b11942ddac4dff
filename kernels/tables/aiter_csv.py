"""AITER's tuned CSV files, read with pandas and merged as AITER does it, and what is wrong with them.

Source: `aiter/jit/core.py` `AITER_CONFIG.get_config_file`, `update_config_files`.
"""

from __future__ import annotations

import contextlib
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

from kernels.tables import RULES_TOML, Problem, files_text
from kernels.tables.files import Files, TableError

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIGS = "aiter/configs"
"""The folder of the tables."""
LINE = "_line"
"""The column of a row's line in AITER's own file. Recorded extracts have it, others get it when read."""
SHORT = "_short"
"""A column that files get when they are read: whether a row has too few cells."""

GFX_OF_UNITS = {float(units): gfx for units, gfx in RULES_TOML["aiter"]["gfx_of_units"].items()}
"""The gfx that AITER gives a row without one."""


@dataclass(frozen=True, eq=False)
class Family:
    """The files that AITER merges into one table (rules.toml)."""

    name: str
    variable: str
    """The environment variable that names files to use instead of the package's."""
    numbers: Sequence[str]
    """The columns of the key that pandas must read as numbers."""
    texts: Sequence[str] = ()
    """The other columns of the key, without gfx."""
    default: str = ""
    """For GEMM, the CK kernel that AITER runs for a shape without a row: instance -1 of `ck_list`."""
    ck_list: str = ""
    """For GEMM, the file in csrc/ that lists the CK kernels."""
    ck_name: str = ""
    """How these kernels are named: a format of the fields in that list."""

    @property
    def untuned(self) -> str:
        """The file of shapes to tune. Its columns are the key of a row."""
        return f"{CONFIGS}/{'untuned'.join(self.name.rsplit('tuned', 1))}.csv"


FAMILIES = {name: Family(**facts) for name, facts in RULES_TOML["aiter"]["families"].items()}
GEMM, PRESHUFFLED, MOE = FAMILIES["gemm"], FAMILIES["preshuffled"], FAMILIES["moe"]


def packaged(files: Files, family: Family) -> list[str]:
    """The names of a family's files in the package: the default one, then those of model_configs/."""
    default = f"{CONFIGS}/{family.name}.csv"
    models = files.names(f"{CONFIGS}/model_configs/*{family.name}*.csv")
    return [default, *(name for name in models if "untuned" not in name.rsplit("/", 1)[-1])]


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a table. Rows are equal only if they are the same object."""

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
        """The texts of the columns `Family.texts`."""
        return tuple(map(self.cell, self.family.texts))

    @property
    def units(self) -> float:
        """The number of CUs of the GPU that it is for."""
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
        """Whether it is for block FP8, of whatever act_type. All rows of GEMM are. fp8: the dtype's name"""
        if self.family is not MOE:
            return True
        _, *types = self.texts
        use_g1u1, doweight_stage1 = self.numbers[6:]
        is_plain_call = use_g1u1 == 1 and doweight_stage1 == 0
        return is_plain_call and types == ["torch.bfloat16", fp8, fp8, "QuantType.per_1x128"]

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
    name: str
    typed: DataFrame
    """The columns `Family.numbers`, as pandas reads them."""
    texts: DataFrame
    """All columns as texts, with LINE, and in SHORT whether the line has too few cells."""


def rows_here(count: int) -> str:
    """Says how many rows a problem is about, the line of which is that of the first row."""
    return "1 row" if count == 1 else f"{count} rows, the first here,"


def _lines(text: str, count: int) -> tuple[list[int], list[bool]]:
    """For each of the `count` rows that pandas reads in a CSV, the number of its line, and whether it has
    fewer cells than the header. Where lines and rows cannot be matched, all are 0 and False."""
    lines = []  # the number and the count of cells of each, the header's first
    with contextlib.suppress(csv.Error):
        reader = csv.reader(io.StringIO(text))
        for cells in reader:
            if len(cells) > 1 or "".join(cells).strip(" \t"):  # pandas leaves out lines of blanks
                lines.append((reader.line_num, len(cells)))
    if len(lines) != count + 1:
        return [0] * count, [False] * count
    (_, columns), *rows = lines
    return [number for number, _ in rows], [cells < columns for _, cells in rows]


class Table:
    """The merged files of a family."""

    def __init__(self, files: Files, family: Family, environment: Mapping[str, str]) -> None:
        self.family, self._files = family, files
        self.problems: list[Problem] = []
        """What is wrong with the files, on any GPU."""
        self.why_no_row_is_found = ""
        """Why no look-up finds any row; empty where rows can be found."""
        self.why_aiter_raises = ""
        """Why AITER's first look-up raises; empty where it does not."""
        self._setting = environment.get(family.variable, "")
        """The files that replace the package's; empty where none are set."""
        in_package = packaged(files, family)
        names = self._setting.split(os.pathsep) if self._setting else in_package
        self._merged = len(names) > 1
        """Whether AITER merges files. It reads a single one as it is."""
        read = [file for file in map(self._read, names) if file]
        self.title = f"{family.name} ({files_text(len(read))})"
        """The name of the table and how many files it has, for people."""
        if self._setting:
            text = f"replaces the {len(in_package)} files of the package by {self._setting}"
            self._add_problem(family.variable, 0, f"{text}: to add to them, name them too")
        self.has_gfx = any("gfx" in file.texts for file in read)
        """Whether gfx is part of the key."""
        for column in family.numbers:
            self._check_numbers(column, [file for file in read if len(file.typed)])
        rows = [row for file in read for row in self._rows_of(file)]
        losers = self._losers(rows)
        self._rows = [row for row in rows if row not in losers]

    def rows(self, arch: str) -> list[Row]:
        """The merged rows for an architecture, with any number of CUs: all where a GEMM's key has no gfx."""
        if self.family is not MOE:
            return [row for row in self._rows if not self.has_gfx or row.gfx in (arch, None)]
        of_arch = [row for row in self._rows if row.gfx in (arch, None)]
        return [row for row in of_arch if row.cell("_tag") != "flydsl_fallback"]

    def _read(self, name: str) -> _File | None:
        """Reads a file as AITER does; None where AITER gets nothing from it. It may add problems."""
        import pandas

        exists = Path(name).exists() if self._setting else self._files.has(name)
        if not exists and self._merged:
            self._add_problem(name or self.family.variable, 0, "does not exist: AITER merges the other files")
            return None
        try:
            text = self._files.text(Path(name) if self._setting else name)
            if "\ufffd" in text:
                raise TableError("not UTF-8")
            typed = pandas.read_csv(io.StringIO(text), low_memory=False)
            texts = pandas.read_csv(io.StringIO(text), dtype="str", low_memory=False)
        except ValueError as error:  # pandas' own, or a TableError
            reason = error.reason if isinstance(error, TableError) else " ".join(str(error).split())
            self._add_error(name, 0, f"cannot be read ({reason}): AITER raises at the first look-up")
            return None
        key_columns = (*self.family.numbers, *self.family.texts)
        if absent := [column for column in key_columns if column not in typed]:
            lacking = f"has no column {', '.join(absent)}: its {len(typed)} rows are never found"
            self._add_problem(name, 1, lacking)
        line_numbers, short = _lines(text, len(typed))
        if LINE in texts:  # in a recorded extract
            line_numbers = pandas.to_numeric(texts[LINE], errors="coerce").fillna(0).astype(int).tolist()
        if any(short):
            first = line_numbers[short.index(True)]
            cut = f"{rows_here(short.count(True))} cut short: AITER reads the missing cells as nan"
            self._add_problem(name, first, cut)
        texts = texts.fillna("").assign(**{LINE: line_numbers, SHORT: short})
        # AITER fills a column that a file does not have with 0.
        return _File(name, typed.reindex(columns=self.family.numbers, fill_value=0), texts)

    def _rows_of(self, file: _File) -> Iterator[Row]:
        from pandas import to_numeric

        columns = [to_numeric(file.typed[column], errors="coerce") for column in self.family.numbers]
        numbers = zip(*(column.astype(float) for column in columns), strict=True)
        for cells, values in zip(file.texts.to_dict("records"), numbers, strict=True):
            yield Row(self.family, file.name, cells.pop(LINE), cells, cells.pop(SHORT), values)

    # Problems

    def _add_problem(self, file: str, line: int, text: str) -> None:
        self.problems.append(Problem(file, line, text))

    def _add_error(self, file: str, line: int, text: str) -> None:
        """Adds a problem for which AITER raises."""
        self._add_problem(file, line, text)
        self.why_aiter_raises = self.why_aiter_raises or f"AITER raises before this look-up: see {file}"

    def _check_numbers(self, column: str, read: Sequence[_File]) -> None:
        """Adds a problem for a cell because of which pandas reads a column of the merged files as text."""
        from pandas import concat, to_numeric
        from pandas.api.types import is_numeric_dtype

        if not read or is_numeric_dtype(concat([file.typed[column] for file in read])):
            return
        count = sum(len(file.typed) for file in read)
        for file in read:
            texts = file.texts.get(column, default=file.typed[column])
            is_text = to_numeric(texts, errors="coerce").isna() & (texts != "")
            if is_text.any():
                first = file.texts[is_text].iloc[0]
                cell = f"{column} is {first[column]!r}"
                self.why_no_row_is_found = f"{file.name}:{first[LINE]}: {cell}, so no row is found"
                effect = f"none of the {count} rows of {self.family.name} is found"
                text = f"{cell}: pandas reads the whole column as text, and {effect}"
                self._add_problem(file.name, first[LINE], text)
                return

    def _losers(self, rows: Sequence[Row]) -> set[Row]:
        """The rows that lose to a faster row with the same key. For each file of these it adds an error."""
        is_moe = self.family is MOE
        if is_moe and not (self._merged and self._files.has(self.family.untuned)):
            return set()  # AITER warns and keeps the first
        effect = "pandas raises ValueError at the first look-up"
        if self._merged:
            effect = "AITER keeps the fastest, rewrites its files and raises RuntimeError"
        fastest: dict[tuple[object, ...], Row] = {}
        losers: set[Row] = set()
        lines: dict[str, list[int]] = defaultdict(list)
        for row in rows:
            tag = row.cells.get("_tag", "0") if is_moe else ""
            key = (row.numbers, row.texts, row.gfx if self.has_gfx else "", tag)
            fastest_so_far = fastest.setdefault(key, row)
            # Where AITER merges nothing, it drops a row that is a copy of another.
            is_copy = not self._merged and row.cells == fastest_so_far.cells
            if fastest_so_far is row or is_copy:
                continue
            rivals = (fastest_so_far, row)
            fastest[key], loser = sorted(rivals, key=lambda row: math.inf if row.us is None else row.us)
            losers.add(loser)
            lines[row.file].append(row.line)
        for file, numbers in lines.items():
            text = f"{rows_here(len(numbers))} with a key that another row has: {effect}"
            self._add_error(file, numbers[0], text)
        return losers
