"""What is wrong with AITER's CSV tables, files and rows: one problem for each kind and file."""

from __future__ import annotations

import ast
import csv
import io
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from kernels.tables import Problem
from kernels.tables.aiter_csv import CONFIGS, GEMM, MOE, PRESHUFFLED, UNITS, Family, Row, Source, rows_here
from kernels.tables.aiter_rules import FORMATS, fp8_of, padded
from kernels.tables.files import TableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.tables import Target
    from kernels.tables.aiter_merge import Merged
    from kernels.tables.files import Files

LADDER = tuple(2**power for power in range(16))
"""The M for which a shape should have rows: powers of two to 32768, the largest chunk of a prefill."""

INSTANCES = {
    GEMM.name: ("ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_instance.py", "a8w8_blockscale"),
    PRESHUFFLED.name: (
        "ck_gemm_a8w8_blockscale_bpreshuffle/gemm_a8w8_blockscale_bpreshuffle_common.py",
        "a8w8_blockscale_bpreshuffle",
    ),
}
"""The file below csrc/ that lists a family's CK kernels, and how their names begin."""

INSTANCE = re.compile(r"^\s*\(?-?\d+\)?:\s*[kK]ernelInstance\((.*)\),?\s*$", re.MULTILINE)


def problems(tables: Merged, target: Target) -> list[Problem]:
    """What is wrong with the tables of families that were asked: first their files, then the rows of this
    GPU."""
    found = []
    if assumed := tables.rules.assumed:
        found.append(Problem("aiter", 0, f"{assumed}: what it finds may be otherwise"))
    found += _unread(tables.files)
    for family in (GEMM, PRESHUFFLED, MOE):
        asked = tables.asked(family)
        if asked == set():
            if tables.environment.get(family.variable):
                found.append(Problem(family.variable, 0, "no shape here is looked for in its table"))
            continue
        table = tables.table(family)
        found += [*table.problems, *_cut_short(family, table.sources, asked)]
        by_file = defaultdict(list)
        for row in table.rows(target.arch):
            if asked is None or row.shape in asked:
                by_file[row.source.file].append(row)
        for file, rows in by_file.items():
            for text, bad in _dead(tables, family, target, rows):
                found.append(Problem(file, bad[0].line, f"{rows_here(len(bad))} {text}"))
        if not table.dead:
            found += _gaps(tables, family, target)
    return found


def _cut_short(
    family: Family, sources: list[Source], asked: set[tuple[int, ...]] | None
) -> Iterator[Problem]:
    """Rows with too few cells, where what they have fits the beginning of a shape that was asked for, and the
    last row of a file that breaks off within it."""

    def may_be_asked(cells: list[str]) -> bool:
        pairs = (zip(shape, cells, strict=False) for shape in asked or ())
        return asked is None or any(all(str(a).startswith(b) for a, b in each) for each in pairs)

    for source in sources:
        if source.error:  # pandas raises before
            continue
        places = [source.columns[c] for c in family.numbers[2:6] if c in source.columns]
        cut = [
            (line, [row[place] for place in places]) for line, row in source.rows if line in source.truncated
        ]
        breaks_off = None if source.ends or not source.rows else source.rows[-1][0]
        if bad := [line for line, cells in cut if line == breaks_off or may_be_asked(cells)]:
            text = f"{rows_here(len(bad))} cut short: AITER reads what lacks as nan"
            yield Problem(source.file, bad[0], text)


def _dead(tables: Merged, family: Family, target: Target, rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """What is wrong with rows of one file: a text and the rows that it is about."""
    arch, tuned = target.arch, tables.by_shape(family, target)
    others = [
        row
        for row in rows
        if row.units != target.units and row.units in UNITS.get(arch, {row.units})
        if row.is_block_fp8(fp8_of(arch)) and row.shape not in tuned
    ]
    if others:
        shapes = {row.shape for row in others}
        many = f"{len(shapes)} shapes" if len(shapes) > 1 else "a shape"
        yield f"for {others[0].units:g} CUs, of {many} without rows for {target.units}", others
    if family is MOE:
        (other,) = set(FORMATS.values()) - {fp8_of(arch)}
        if bad := [row for row in rows if other in row.texts[2:4]]:
            yield f"of {other}, which {arch} never asks for", bad
        reachable = {*LADDER, *tables.rules.moe_tiers}
        if bad := [row for row in rows if row.m not in reachable]:
            yield f"for {bad[0].m:g} tokens, which no number of tokens is padded to", bad
    if family is GEMM and (bad := [row for row in rows if row.cell("libtype") not in ("ck", "cktile", "")]):
        yield f"of libtype {bad[0].cell('libtype')[:20]}, which this GEMM asserts against", bad
    yield from _unknown_names(tables.files, family, arch, rows)


def _gaps(tables: Merged, family: Family, target: Target) -> Iterator[Problem]:
    """Shapes that have rows, but none that a look-up finds for some M."""
    gaps: dict[str, list[tuple[list[int], Row]]] = defaultdict(list)
    wanted = tables.asked(family)
    for shape, by_m in tables.by_shape(family, target).items():
        if wanted is not None and shape not in wanted:
            continue
        missed = []
        for m in LADDER:
            asked = [tables.rules.token(m)] if family is MOE else padded(m, int(shape[0]))
            if not any(tried in by_m for tried in asked):
                missed.append(m)
        if missed and len(by_m) > 1:
            last = by_m[max(by_m)][0]
            gaps[last.source.file].append((missed, last))
    for file, shapes in gaps.items():
        missed, row = max(shapes, key=lambda shape: len(shape[0]))
        many = f"{len(shapes)} shapes have" if len(shapes) > 1 else "a shape has"
        name = "x".join(f"{part:g}" for part in row.shape)
        ms = ("" if len(missed) < 5 else "... ") + ", ".join(map(str, missed[-4:]))
        yield Problem(file, row.line, f"{many} rows, but not for every M: {name} has none for M {ms}")


def _unknown_names(
    files: Files, family: Family, arch: str, rows: list[Row]
) -> Iterator[tuple[str, list[Row]]]:
    """Rows whose kernels this copy does not have. Any name of CK Tile, CK's MoE and FlyDSL passes, because
    their names are not known here."""
    assembled = _assembled(
        files, arch, ("fmoe/*", "fmoe_2stages") if family is MOE else ("fp8gemm_blockscale",)
    )
    built = set() if family is MOE else _built(files, family)
    bad = []
    for row in rows:
        for column in ("kernelName1", "kernelName2") if family is MOE else ("kernelName",):
            name = row.cell(column)
            known = assembled if name.startswith("_ZN") else built if row.cell("libtype") == "ck" else set()
            if name and known and name not in known and not row.truncated:
                bad.append((row, name))
    if bad:
        yield f"of kernel {bad[0][1][:200]}, which this AITER does not have", [row for row, _ in bad]


def _assembled(files: Files, arch: str, folders: tuple[str, ...]) -> set[str]:
    """The names of the assembled kernels; empty where their lists are not there."""
    names = set()
    for root in ("hsa", "aiter_meta/hsa"):
        for folder in folders:
            for file in files.names(f"{root}/{arch}/{folder}/*.csv"):
                try:
                    rows = csv.DictReader(io.StringIO(files.text(file), newline=""))
                    names |= {row.get("knl_name") or "" for row in rows}
                except (TableError, csv.Error):
                    continue
    return names


def _built(files: Files, family: Family) -> set[str]:
    """The names of a family's CK kernels; empty where their list is not there or cannot be read."""
    file, prefix = INSTANCES[family.name]
    names = set()
    for root in ("csrc", "aiter_meta/csrc"):
        try:
            text = files.text(f"{root}/{file}") if files.has(f"{root}/{file}") else ""
            for call in INSTANCE.findall(text):
                names.add(_instance(prefix, ast.literal_eval(f"({call})")))
        except (TableError, ValueError, SyntaxError, IndexError, TypeError, RecursionError, MemoryError):
            return set()
    return names


def _instance(prefix: str, sizes: tuple[object, ...]) -> str:
    """A kernel's name, as `KernelInstance.name` joins it from its fields. The preshuffled ones leave out the
    waves."""
    waves = () if "bpreshuffle" in prefix else (sizes[11:13],)
    groups = (sizes[1:4], (sizes[0], *sizes[4:7]), sizes[7:9], sizes[9:11], *waves)
    lists = (sizes[13], sizes[14], sizes[17], sizes[18], sizes[15:17])
    parts = ["x".join(map(str, group)) for group in (*groups, *lists)]
    return "_".join((prefix, *parts, str(sizes[19]).lower(), f"v{sizes[20]}"))


def _unread(files: Files) -> Iterator[Problem]:
    """Files of model_configs/ that no family reads, or that this folder holds no file."""
    try:
        core = files.text("aiter/jit/core.py")
    except TableError:
        return
    families = re.findall(r'"(\w+_tuned\w*|tuned_\w+)"', core)
    if "model_configs" in core and not files.names(f"{CONFIGS}/model_configs/*"):
        yield Problem(f"{CONFIGS}/model_configs", 0, "no such folder, or none that may be read")
    for file in files.names(f"{CONFIGS}/model_configs/*.csv"):
        name = file.rsplit("/", 1)[1]
        if families and "untuned" not in name and not any(family in name for family in families):
            yield Problem(file, 0, "is never read: its name holds no name of a table")
