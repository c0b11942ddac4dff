"""The CSV files of one table, merged as AITER merges them with pandas, and what is wrong with them.

Source: `aiter/jit/core.py` `AITER_CONFIG.get_config_file`, `update_config_files`.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.tables import Problem, printable
from kernels.tables.aiter_csv import (
    BOOLEANS,
    CONFIGS,
    LINE,
    MISSING,
    MOE,
    NUMBERS,
    UNITS,
    Family,
    Row,
    Source,
    number,
    rows_here,
)
from kernels.tables.aiter_rules import Rules, fp8_of, read_rules
from kernels.tables.aiter_triton import TritonTables
from kernels.tables.files import Files, TableError, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kernels.tables import Target

GFX_OF_UNITS = {256: "gfx950", 80: "gfx942", 304: "gfx942"}
"""The gfx that AITER gives a row that has none (`aiter/jit/utils/chip_info.py` `_LEGACY_CU_NUM_TO_GFX`)."""

ARCHITECTURE = re.compile(r"gfx(90a|94[0-2]|950|1[0-2]\d\d)")


def packaged(files: Files, family: Family, merges: bool = True) -> list[str]:
    """Names of a family's files in the package: the default one, then those of model_configs/."""
    default = f"{CONFIGS}/{family.name}.csv"
    models = files.names(f"{CONFIGS}/model_configs/*{family.name}*.csv") if merges else []
    return [default, *(name for name in models if "untuned" not in name.rsplit("/", 1)[-1])]


class Table:
    """The merged files of a family.

    given:    the value of the variable that replaces the package's files; empty where it is not set
    merged:   whether AITER merges several files
    sources:  the files that have a header
    problems: what is wrong with the files, whatever the GPU
    title:    the name of the table and how many files it has, for people
    has_gfx:  whether any file has a column gfx; has_tag: likewise for _tag
    dead:     why no look-up finds any row; empty where rows can be found
    raises:   why AITER's first look-up raises; empty where it does not
    """

    def __init__(self, files: Files, family: Family, rules: Rules, environment: Mapping[str, str]) -> None:
        self.family, self._files, self._rules = family, files, rules
        self.problems: list[Problem] = []
        self.dead = self.raises = ""
        self.given = environment.get(family.variable, "")
        in_package = packaged(files, family, rules.merges)
        names = self.given.split(os.pathsep) if self.given else in_package
        self.merged = len(names) > 1
        self.sources = [source for name in names if (source := self._read(name))]
        count = "1 file" if len(self.sources) == 1 else f"{len(self.sources)} files"
        self.title = f"{family.name} ({count})"
        if self.given:
            self._say_what_is_replaced(in_package)
        self.has_gfx = any("gfx" in source.columns for source in self.sources)
        self.has_tag = any("_tag" in source.columns for source in self.sources)
        self._check_columns()
        self._rows: dict[str, list[Row]] = {}
        self._lost = self._duplicates()

    def _read(self, name: str) -> Source | None:
        there = Path(name).exists() if self.given else self._files.has(name)
        if not there and self.merged:
            self._say(name or self.family.variable, 0, "is not there: AITER merges the other files")
            return None
        try:
            text = read(Path(name), name) if self.given else self._files.text(name)
        except TableError as error:
            text = f"cannot be read ({error.reason}): AITER raises at the first look-up"
            self._say_that_it_raises(name, 0, text)
            return None
        source = Source(name, text)
        if source.error:
            self._say_that_it_raises(name, 0, f"{source.error}: AITER raises at the first look-up")
        elif not source.rows and LINE not in source.columns:
            self._say(name, 1, "has no rows")
        return source if source.columns else None

    def _say(self, file: str, line: int, text: str) -> None:
        self.problems.append(Problem(file, line, text))

    def _say_that_it_raises(self, file: str, line: int, text: str) -> None:
        self._say(file, line, text)
        self.raises = self.raises or f"AITER raises before it gets here: see {file}"

    def _say_what_is_replaced(self, hidden: list[str]) -> None:
        rows, extracts = 0, False
        for name in hidden:
            if self._files.has(name):
                try:
                    lines = self._files.text(name).split("\n")
                except TableError:
                    continue
                rows += max(0, len(lines) - 2)
                extracts |= LINE in lines[0].split(",")
        many = "" if extracts else f", {rows} rows,"  # of an extract nothing tells how many the file has
        self._say(
            self.family.variable,
            0,
            f"replaces the {len(hidden)} files of the package{many} by {self.given}: "
            "to add to them, name them too",
        )

    def _check_columns(self) -> None:
        family = self.family
        for source in self.sources:
            if source.error:  # pandas raises before
                continue
            absent = [c for c in (*family.numbers, *family.texts) if c not in source.columns]
            if absent:
                rows = f"its {len(source.rows)} rows are never found"
                self._say(source.file, 1, f"has no column {', '.join(absent)}: {rows}")
            elif "gfx" in source.columns:
                self._say_of_no_gpu(source)
            elif source.rows:
                self._say_without_gfx(source)
        total = sum(len(source.rows) for source in self.sources)
        for column in family.numbers:
            kinds: dict[str, tuple[str, int, str]] = {}
            for source in self.sources:
                cells = source.cells(column)
                for cell in set(cells):
                    if (value := number(cell)) is None or not math.isnan(value):
                        kind = "text" if value is None else "bool" if cell.strip() in BOOLEANS else "number"
                        if kind not in kinds:
                            kinds[kind] = (source.file, source.rows[cells.index(cell)][0], cell)
            if "text" in kinds or len(kinds) > 1:
                file, line, cell = kinds.get("text") or kinds["bool"]
                self.dead = f"{file}:{line}: {column} is {cell[:20]!r}, so no row is found"
                self._say(
                    file,
                    line,
                    f"{column} is {cell[:20]!r}: pandas reads the whole column as text, "
                    f"and none of the {total} rows of {family.name} is found",
                )

    def _say_of_no_gpu(self, source: Source) -> None:
        pairs = list(zip(self._gfx(source), source.cells("cu_num"), strict=True))
        odd = {
            (gfx, units)
            for gfx, units in set(pairs)
            if gfx not in MISSING
            if not ARCHITECTURE.fullmatch(gfx) or NUMBERS[units] not in UNITS.get(gfx, {NUMBERS[units]})
        }
        if bad := [place for place, pair in enumerate(pairs) if pair in odd]:
            gfx, units = pairs[bad[0]]
            text = f"{rows_here(len(bad))} for {gfx[:20]} with {units[:20]} CUs, which is no GPU"
            self._say(source.file, source.rows[bad[0]][0], printable(text))

    def _say_without_gfx(self, source: Source) -> None:
        if self.family is MOE:
            units = {NUMBERS[cell] for cell in source.cells("cu_num")} - set(GFX_OF_UNITS)
            if units and self._rules.moe_gfx:
                numbers = ", ".join(f"{unit:g}" for unit in sorted(units))
                self._say(source.file, 1, f"has no column gfx, and AITER knows none of cu_num {numbers}")
        elif not self.has_gfx:
            self._say(source.file, 1, "has no column gfx: a row is found by its number of CUs on any GPU")
        elif not self._rules.infers_gfx:
            self._say(source.file, 1, f"has no column gfx: its {len(source.rows)} rows are never found")
        else:
            self._say(source.file, 1, "has no column gfx: AITER takes it from cu_num, 80 and 304 or 256")

    def _duplicates(self) -> set[tuple[int, int]]:
        """The rows, each as (index of its source, line), that lose to a faster row with the same key."""
        lost: set[tuple[int, int]] = set()
        moe = self.family is MOE
        if moe and not (self.merged and self._files.has(self.family.untuned)):
            return lost  # AITER warns and keeps the first
        raises = not self.merged or self._rules.duplicates_raise
        if not self.merged:
            then = "pandas raises ValueError at the first look-up"
        elif raises:
            then = "AITER keeps the fastest, rewrites its files and raises RuntimeError"
        else:
            then = "AITER keeps the fastest"
        best: dict[tuple[object, ...], tuple[float, int, int]] = {}
        for place, source in enumerate(self.sources):
            if source.error:  # pandas raises before
                continue
            columns: list[list[str] | list[float]] = [
                [NUMBERS[cell] for cell in source.cells(column)] for column in self.family.numbers
            ]
            columns += [source.cells(column) for column in self.family.texts]
            if self.has_gfx:
                columns.append(self._gfx(source))
            if moe and self.has_tag:
                columns.append(source.cells("_tag"))
            copies: set[tuple[str, ...]] = set()
            lines = []
            times = [NUMBERS[cell] for cell in source.cells("us", "")]
            for (line, cells), us, key in zip(source.rows, times, zip(*columns, strict=True), strict=True):
                if not self.merged and (copy := tuple(cells)) in copies:
                    continue  # AITER drops whole copies where it merges nothing
                if not self.merged:
                    copies.add(copy)
                here = (math.inf if math.isnan(us) else us, place, line)
                before = best.setdefault(key, here)
                if before is not here:
                    best[key], worse = sorted((before, here))
                    lost.add(worse[1:])
                    lines.append(line)
            if lines:
                say = self._say_that_it_raises if raises else self._say
                say(source.file, lines[0], f"{rows_here(len(lines))} with a key that another row has: {then}")
        return lost

    def _gfx(self, source: Source, live: str = "") -> list[str]:
        """The gfx of each row of a file, as the merge fills it in. live: the gfx of the GPU, which AITER
        gives a row whose cu_num it does not know"""
        if "gfx" in source.columns:
            cells = source.cells("gfx")
            if self.family is not MOE:
                return cells
        elif not (self._rules.infers_gfx if self.family is not MOE else self._rules.moe_gfx):
            return ["0"] * len(source.rows)
        else:
            cells = [""] * len(source.rows)
        units = source.cells("cu_num")
        return [
            gfx if gfx not in MISSING and gfx != "0" else GFX_OF_UNITS.get(NUMBERS[unit], live)  # type: ignore[call-overload]
            for gfx, unit in zip(cells, units, strict=True)
        ]

    def rows(self, arch: str) -> list[Row]:
        """The rows that are for this architecture, with whatever number of CUs, in the merge's order."""
        if arch not in self._rows:
            self._rows[arch] = list(self._select(arch))
        return self._rows[arch]

    def _select(self, arch: str) -> Iterator[Row]:
        family = self.family
        by_gfx = self._rules.moe_gfx if family is MOE else self.has_gfx
        for place, source in enumerate(self.sources):
            gfxs = self._gfx(source, arch)
            numbers = [source.cells(column) for column in family.numbers]
            texts = [source.cells(column) for column in family.texts]
            tags = source.cells("_tag", "0" if self.has_tag else "")
            for index, (line, cells) in enumerate(source.rows):
                if by_gfx and gfxs[index] != arch:
                    continue
                if (place, line) in self._lost or (family is MOE and not self._rules.keeps_tag(tags[index])):
                    continue
                yield Row(
                    source,
                    line,
                    cells,
                    tuple(NUMBERS[column[index]] for column in numbers),
                    tuple(column[index] for column in texts),
                )


Shapes = dict[tuple[float, ...], dict[int, list[Row]]]
"""Rows by shape (N, K or model_dim, inter_dim, expert, topk), then by M."""


class Merged:
    """Tables of one copy of AITER, each read when it is first asked.

    environment: the variables that the engine is started with
    triton:      the tables of AITER's Triton GEMM
    """

    def __init__(self, files: Files, environment: Mapping[str, str] | None = None) -> None:
        self.files, self.environment = files, environment or {}
        self.rules = read_rules(files)
        self.triton = TritonTables(files, self.rules)
        self._tables: dict[Family, Table] = {}
        self._asked: dict[Family, set[tuple[int, ...]]] = defaultdict(set)
        self._shapes: dict[tuple[Family, Target], Shapes] = {}

    def asked(self, family: Family) -> set[tuple[int, ...]] | None:
        """The shapes of a family that were looked up; None where nothing was, so that all shapes count."""
        if self._asked or self.triton.asked:
            return self._asked.get(family, set())
        return None

    def table(self, family: Family) -> Table:
        if family not in self._tables:
            self._tables[family] = Table(self.files, family, self.rules, self.environment)
        return self._tables[family]

    def by_shape(self, family: Family, target: Target) -> Shapes:
        """The rows of a family that a look-up for this GPU can find."""
        if (family, target) not in self._shapes:
            shapes: Shapes = defaultdict(lambda: defaultdict(list))
            table = self.table(family)
            for row in () if table.dead else table.rows(target.arch):
                if (
                    row.units == target.units
                    and row.is_block_fp8(fp8_of(target.arch))
                    and all(size.is_integer() for size in (row.m, *row.shape))  # NaN is none
                ):
                    shapes[row.shape][int(row.m)].append(row)
            self._shapes[family, target] = shapes
        return self._shapes[family, target]
