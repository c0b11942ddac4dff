"""What is wrong with AITER's CSV tables: one problem for each kind and file."""

from __future__ import annotations

import ast
import csv
import io
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from kernels.tables import Problem
from kernels.tables.aiter_csv import CONFIGS, GEMM, MOE, PRESHUFFLED, UNITS, Family, Row, rows_here
from kernels.tables.aiter_rules import FORMATS, fp8_of, padded
from kernels.tables.files import TableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.tables import Target
    from kernels.tables.aiter import AiterTables
    from kernels.tables.files import Files

LADDER = tuple(2**power for power in range(16))
"""The M for which a shape should have rows: the powers of two up to 32768, the largest chunk of a prefill."""

INSTANCES = {
    GEMM.name: ("ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_instance.py", "a8w8_blockscale"),
    PRESHUFFLED.name: (
        "ck_gemm_a8w8_blockscale_bpreshuffle/gemm_a8w8_blockscale_bpreshuffle_common.py",
        "a8w8_blockscale_bpreshuffle",
    ),
}
"""By family, the file in csrc/ that lists its CK kernels, and how their names begin."""

INSTANCE = re.compile(r"^\s*\(?-?\d+\)?:\s*[kK]ernelInstance\((.*)\),?\s*$", re.MULTILINE)


def problems(tables: AiterTables, target: Target) -> list[Problem]:
    """What is wrong with the tables that were asked: with their files, then with their rows for this GPU."""
    found = []
    if assumed := tables.rules.assumed:
        found.append(Problem("aiter", 0, f"{assumed}: the look-ups may differ from its own"))
    found += _unread(tables.files)
    for family in (GEMM, PRESHUFFLED, MOE):
        asked = tables.asked(family)
        if asked == set():
            if tables.environment.get(family.variable):
                found.append(Problem(family.variable, 0, "no kernel of this deployment looks into its table"))
            continue
        table = tables.table(family)
        found += table.problems
        for source in table.sources:
            if source.truncated and not source.error:  # with an error, pandas raises before
                text = f"{rows_here(len(source.truncated))} cut short: AITER reads the missing cells as nan"
                found.append(Problem(source.file, min(source.truncated), text))
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


def _dead(
    tables: AiterTables, family: Family, target: Target, rows: list[Row]
) -> Iterator[tuple[str, list[Row]]]:
    """What is wrong with the rows of a file: texts, each with the rows that it is about."""
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
            yield f"of {other}, which {arch} never looks up", bad
        reachable = {*LADDER, *tables.rules.moe_tiers}
        if bad := [row for row in rows if row.m not in reachable]:
            yield f"for {bad[0].m:g} tokens, which no number of tokens is padded to", bad
    if family is GEMM and (bad := [row for row in rows if row.cell("libtype") not in ("ck", "cktile", "")]):
        yield f"of libtype {bad[0].cell('libtype')[:20]}, which this GEMM refuses", bad
    yield from _unknown_names(tables.files, family, arch, rows)


def _gaps(tables: AiterTables, family: Family, target: Target) -> Iterator[Problem]:
    """Shapes that have rows, but for some M none that a look-up finds."""
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
    """Rows whose kernels this copy of AITER does not have. All names of CK Tile, CK's MoE and FlyDSL pass, as
    these are not known here."""
    assembled = _assembled(
        files, arch, ("fmoe/*", "fmoe_2stages") if family is MOE else ("fp8gemm_blockscale",)
    )
    built = set() if family is MOE else _built(files, family)
    bad = []
    for row in rows:
        for column in ("kernelName1", "kernelName2") if family is MOE else ("kernelName",):
            name, known = row.cell(column), set[str]()
            if name.startswith("_ZN"):
                known = assembled
            elif row.cell("libtype") == "ck":
                known = built
            if name and known and name not in known and not row.truncated:
                bad.append((row, name))
    if bad:
        yield f"of kernel {bad[0][1][:200]}, which this AITER does not have", [row for row, _ in bad]


def _assembled(files: Files, arch: str, folders: tuple[str, ...]) -> set[str]:
    """The names of the assembly kernels; empty where their lists are missing."""
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
    """The names of a family's CK kernels; empty where their list is missing or cannot be read."""
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
    """The name of a kernel, as `KernelInstance.name` makes it from the fields. Names of preshuffled kernels
    leave out the waves."""
    waves = () if "bpreshuffle" in prefix else (sizes[11:13],)
    groups = (sizes[1:4], (sizes[0], *sizes[4:7]), sizes[7:9], sizes[9:11], *waves)
    lists = (sizes[13], sizes[14], sizes[17], sizes[18], sizes[15:17])
    parts = ["x".join(map(str, group)) for group in (*groups, *lists)]
    return "_".join((prefix, *parts, str(sizes[19]).lower(), f"v{sizes[20]}"))


def _unread(files: Files) -> Iterator[Problem]:
    """Files of model_configs/ that no family reads, or that there are none."""
    try:
        core = files.text("aiter/jit/core.py")
    except TableError:
        return
    families = re.findall(r'"(\w+_tuned\w*|tuned_\w+)"', core)
    if "model_configs" in core and not files.names(f"{CONFIGS}/model_configs/*"):
        yield Problem(f"{CONFIGS}/model_configs", 0, "no such folder, or no permission to read it")
    for file in files.names(f"{CONFIGS}/model_configs/*.csv"):
        name = file.rsplit("/", 1)[1]
        if families and "untuned" not in name and not any(family in name for family in families):
            yield Problem(file, 0, "is never read: its name does not contain the name of a table")
