"""What AITER finds in its tuned tables for GEMM and MoE with block FP8, what it runs where it finds nothing,
and what is wrong with the tables.

Sources: `get_CKGEMM_config` of `aiter/ops/gemm_op_a8w8.py` and `get_2stage_cfgs` of `aiter/fused_moe.py`, at
commit e404860 (v0.1.21.dev0). v0.1.19 and v0.1.20 look up in the same way. Older releases differ in the key
of MoE, and in what a merge does with gfx and with equal keys. `why_other_rules` recognises them.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import functools
import io
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from kernels.formats import native
from kernels.tables import RULES_TOML, Entry, Found, Problem
from kernels.tables.aiter_csv import CONFIGS, FAMILIES, GEMM, MOE, PRESHUFFLED, Family, Row, Table, rows_here
from kernels.tables.aiter_triton import TritonTables
from kernels.tables.files import RECORDED, Files, TableError
from kernels.tuning import Target

Shapes = dict[tuple[float, ...], dict[int, list[Row]]]
"""Rows by shape (N, K or model_dim, inter_dim, expert, topk), then by M."""

AITER = RULES_TOML["aiter"]
INSTANCE = re.compile(r"^\s*\(?-?\d+\)?:\s*[kK]ernelInstance\((.*)\),?\s*$", re.MULTILINE)
"""A line of a family's `ck_list`: `7: KernelInstance(256, 1, ...),`. The group is the arguments."""


class AiterTables:
    """The tables of one copy of AITER. Each is read when it is first needed."""

    def __init__(self, files: Files, environment: Mapping[str, str] | None = None) -> None:
        """environment: the variables with which the engine is started."""
        self.files, self.environment = files, environment or {}
        self.triton = TritonTables(files)
        self._looked_up: dict[Family, set[tuple[float, ...]]] = defaultdict(set)
        """By family, the shapes of all look-ups."""
        self._missed: dict[Family, set[tuple[int, ...]]] = defaultdict(set)
        """By family, the look-ups that found no row, as (*shape, M)."""

    @functools.cache  # noqa: B019  # a copy of AITER is read once in a process
    def table(self, family: Family) -> Table:
        return Table(self.files, family, self.environment)

    @functools.cache  # noqa: B019
    def by_shape(self, family: Family, target: Target) -> Shapes:
        """The rows of a family that a look-up for this GPU can find."""
        shapes: Shapes = defaultdict(lambda: defaultdict(list))
        table = self.table(family)
        if table.why_no_row_is_found:
            return shapes
        for row in table.rows(target.arch):
            is_whole = all(size.is_integer() for size in (row.m, *row.shape))  # NaN is no integer
            if is_whole and row.units == target.units and row.is_block_fp8(fp8_of(target.arch)):
                shapes[row.shape][int(row.m)].append(row)
        return shapes

    def gemm(self, target: Target, m: int, n: int, k: int, preshuffled: bool = False) -> Found:
        """Looks up y [m, n] = x [m, k] w [n, k]^T as `gemm_a8w8_blockscale` or its `_bpreshuffle` does."""
        family = PRESHUFFLED if preshuffled else GEMM
        table = self.table(family)
        ms = padded(m, n)
        row = self._row(family, target, (n, k), ms)
        if row is None:
            return self._miss(family, target, (n, k), ms, f"CK {family.default}")
        row_m = int(row.m)
        name = row.cell("kernelName") or f"kernelId {row.cell('kernelId')}"
        kernel = f"{row.cell('libtype')} {name}".strip()
        if split := row.cell("splitK"):
            kernel += f", splitK {split}"
        key = f"{target.arch}," if table.has_gfx else ""
        key += f"{target.units},{row_m},{n},{k}"
        return self._found(table, row, key, kernel, m, self._doubts(row, family, target, 2 * row_m * n * k))

    def moe(
        self,
        target: Target,
        tokens: int,
        hidden: int,
        inter: int,
        experts: int,
        columns: int,
        mask: bool = False,
    ) -> Found:
        """Looks up what `fused_moe` does for block FP8 (per_1x128) with SiLU, gate and up in one product.

        experts, columns: how many experts w1 of this rank has, and how many columns topk_ids has
        mask:             whether an expert_mask is passed, as with EP
        """
        table = self.table(MOE)
        topk = columns - 1 if mask else columns  # as AITER counts them
        padded_m = padded_tokens(tokens)
        shape = (hidden, inter, experts, topk)
        smaller_tiers = [tier for tier in reversed(AITER["moe_tiers"]) if tier < padded_m]
        default = self._moe_default(target, padded_m, shape)
        row = self._row(MOE, target, shape, [padded_m, *smaller_tiers])
        if row is None:
            return self._miss(MOE, target, shape, [padded_m], default)
        if self.environment.get("AITER_BYPASS_TUNE_CONFIG", "0").strip() not in ("", "0"):
            self._missed[MOE].add((*shape, padded_m))
            note = f"AITER_BYPASS_TUNE_CONFIG: {row.file}:{row.line} is not used"
            return Found(table.title, None, default, (note,))
        row_m, fp8 = int(row.m), fp8_of(target.arch).removeprefix("torch.")
        key = ",".join(map(str, (target.arch, target.units, row_m, *shape, fp8)))
        notes = list(self._doubts(row, MOE, target, 6 * row_m * topk * hidden * inter))
        if row.cell("act_type") != "ActivationType.Silu":
            act = row.cell("act_type").removeprefix("ActivationType.")
            notes.append(f"a row of {act} is used: AITER does not compare act_type, and this row comes first")
        return self._found(table, row, key, _moe_kernel(row), tokens, notes)

    def _row(self, family: Family, target: Target, shape: tuple[int, ...], ms: list[int]) -> Row | None:
        """The row that AITER finds; None after a miss. ms: the M that it looks up, in order"""
        self._looked_up[family].add(shape)
        by_m = self.by_shape(family, target).get(shape, {})
        for m in ms:
            if by_m.get(m):
                return by_m[m][0]
        self._missed[family].add((*shape, ms[0]))
        return None

    def _miss(
        self, family: Family, target: Target, shape: tuple[int, ...], ms: list[int], fallback: str
    ) -> Found:
        """The result of a look-up that found no row. ms: those that the reason names"""
        why = self._why_missed(family, target, shape, ms)
        return Found(self.table(family).title, None, fallback, (why,) if why else ())

    def _why_missed(self, family: Family, target: Target, shape: tuple[int, ...], ms: list[int]) -> str:
        """Why no row of a shape was found; empty where there is no row that seems to match."""
        table = self.table(family)
        if table.why_aiter_raises or table.why_no_row_is_found:
            return table.why_aiter_raises or table.why_no_row_is_found
        by_m = self.by_shape(family, target).get(shape, {})
        if by_m:
            rows = f"rows for M {min(by_m)} to {max(by_m)}" if len(by_m) > 1 else f"a row for M {min(by_m)}"
            return f"the shape has {rows}, none for {', '.join(map(str, ms))}"
        of_shape = [row for row in table.rows(target.arch) if row.shape == shape]
        usable = [row for row in of_shape if row.is_block_fp8(fp8_of(target.arch))]
        if other_units := {f"{row.units:g}" for row in usable if row.units != target.units}:
            return f"the shape has rows for {', '.join(sorted(other_units))} CUs, not {target.units}"
        same_sizes = {other for other in self.by_shape(family, target) if other[:2] == shape[:2]}
        if same_sizes:  # of MoE: a shape of GEMM has only two sizes
            pairs = [f"{experts:g} experts with topk {topk:g}" for _, _, experts, topk in sorted(same_sizes)]
            return f"there are rows for {', '.join(pairs)}, not {shape[2]} with {shape[3]}"
        return ""

    def _found(
        self, table: Table, row: Row, key: str, kernel: str, call_m: int, notes: Iterable[str]
    ) -> Found:
        row_m = int(row.m)
        notes = [*notes, f"tuned for {row_m} rows, asked for {call_m}"] if row_m < call_m else [*notes]
        if table.why_aiter_raises:
            notes.append(table.why_aiter_raises)
        entry = Entry(row.file, row.line, key, row_m, kernel, row.us)
        return Found(table.title, entry, notes=tuple(notes))

    def _doubts(self, row: Row, family: Family, target: Target, flops: int) -> Iterator[str]:
        """Why a row may be wrong: it is cut short, or its time cannot be that of these flops."""
        if row.truncated:
            yield "the row's line is cut short: AITER reads the missing cells as nan"
        if "us" not in row.cells:
            return
        us = row.us
        if us is None or us <= 0:
            yield "the row has no time"
            return
        tflops_per_s = flops / us / 1e6
        peak = AITER["tflops_per_unit"].get(target.arch, math.inf) * target.units
        if tflops_per_s > peak:
            yield f"{us:g} us would be {tflops_per_s:.0f} TFLOP/s, above the peak of {peak:.0f}"
        by_m = self.by_shape(family, target)[row.shape]
        ms = sorted(by_m)
        index = ms.index(int(row.m))
        neighbours = [other for m in ms[max(0, index - 1) : index + 2] if m != row.m for other in by_m[m]]
        if any(other.us == us and other.texts == row.texts for other in neighbours):
            yield f"{us:g} us is in the next row, too: a copied time"

    def problems(self, target: Target) -> list[Problem]:
        """What is wrong with the rows of shapes that were looked up, one problem for each kind and file."""
        found = []
        if reason := why_other_rules(self.files):
            found.append(Problem("aiter", 0, f"{reason}: the look-ups may differ from its own"))
        found += _unread(self.files)
        for family in FAMILIES.values():
            if not self._looked_up[family]:
                if self.environment.get(family.variable):
                    text = "no kernel of this deployment looks into its table"
                    found.append(Problem(family.variable, 0, text))
                continue
            found += self.table(family).problems
            by_file = defaultdict(list)
            for row in self.table(family).rows(target.arch):
                if row.shape in self._looked_up[family] and row.m.is_integer():
                    by_file[row.file].append(row)
            for file, rows in by_file.items():
                for text, bad in _faults(self, family, target, rows):
                    found.append(Problem(file, bad[0].line, f"{rows_here(len(bad))} {text}"))
        return found + self.triton.problems(target)

    def _moe_default(self, target: Target, padded_m: int, shape: tuple[int, int, int, int]) -> str:
        """What `fused_moe` runs for a shape without a row."""
        _, inter, _, _ = shape
        if padded_m > 32 and inter % 128 == 0:
            return "1stage asm chosen by get_heuristic_kernel, block_m 32"
        block_m = 64 if padded_m > 32 else 16
        split = self._split(target.units, padded_m, *shape)
        return f"2stage CK chosen by moe_stage1/2_heuristic_dispatch, block_m {block_m}, ksplit {split}"

    def _split(self, units: int, padded_m: int, hidden: int, inter: int, experts: int, topk: int) -> int:
        """Into how many parts `get_ksplit` of `aiter/fused_moe.py` splits hidden; 0 for no split."""
        forced = self.environment.get("AITER_KSPLIT", "0").strip()
        if forced.lstrip("-").isdecimal() and int(forced):
            return int(forced)
        tiles = padded_m * topk * -(-inter // 128)
        if tiles == 0 or tiles >= units or padded_m * topk > experts:
            return 0
        for split in range(-(-units // tiles), 1, -1):
            if hidden % split == 0 and hidden // split % 256 == 0:
                return split
        return 0

    def untuned(self, target: Target) -> dict[str, str]:
        """CSV files of the shapes that were missed, by name, as AITER's tuners read them.

        For GEMM they have the exact M, which AITER looks for first. For MoE they have the padded number of
        tokens and the topk of the look-up, because AITER looks for nothing else.
        """
        fp8, texts = fp8_of(target.arch), {}
        of_moe = ("ActivationType.Silu", "torch.bfloat16", fp8, fp8, "QuantType.per_1x128", 1, 0)
        for family, missed in self._missed.items():
            constants = of_moe if family is MOE else ()
            # cu_num, the first number, is left out. MoE's last two, which are flags, stand behind its texts.
            columns = [*family.numbers[1:6], *family.texts, *family.numbers[6:]]
            rows = [columns, *((m, *shape, *constants) for *shape, m in sorted(missed))]
            name = PurePosixPath(family.untuned).name
            texts[name] = "".join(f"{','.join(map(str, row))}\n" for row in rows)
        return texts


def fp8_of(arch: str) -> str:
    """The FP8 format of an architecture, as `aiter/utility/dtypes.py` has it."""
    return f"torch.float8_{native(arch)}"


def padded(m: int, n: int) -> list[int]:
    """The M for which a GEMM is looked up, in order: m, then two paddings of it (`getPaddedM`)."""
    step = next(step for largest_m, step in AITER["gemm_steps"] if m <= largest_m)
    fine = -(-m // step) * step
    coarse = 8192 if m > 8192 and n > 4096 else power_of_two(m)
    return list(dict.fromkeys((m, fine, coarse)))


def padded_tokens(tokens: int) -> int:
    """The number of tokens in the key of MoE, as `get_padded_M` of `aiter/fused_moe.py` returns it."""
    return max((tier for tier in AITER["moe_tiers"] if tokens >= tier), default=power_of_two(tokens))


def power_of_two(m: int) -> int:
    """The smallest power of two that is at least m."""
    return 1 << max(m - 1, 0).bit_length()


def why_other_rules(files: Files) -> str:
    """Why this copy of AITER may look up in another way; empty if it does not, and for recorded extracts."""
    if files.path.parent == RECORDED:
        return ""
    try:
        core, moe = files.text("aiter/jit/core.py"), files.text("aiter/fused_moe.py")
    except TableError as error:
        return f"it has no readable {error.name.removeprefix('aiter/')}"
    has_newer_rules = "gfx_from_cu_num" in core and "_PADDED_M_TIERS" in moe
    # Older releases have the activation in MoE's key, or leave out its rows that have any `_tag`.
    has_older_rules = re.search(r'^ +str\(activation\),$|\["_tag"\]\.fillna\(""\) == ""', moe, re.MULTILINE)
    return "older than v0.1.19" if has_older_rules or not has_newer_rules else ""


def _moe_kernel(row: Row) -> str:
    """`1stage NAME, block_m 32`, or the names of both stages with block_m and ksplit."""
    first, second = (row.cell(f"kernelName{stage}") or "default" for stage in (1, 2))
    block = f"block_m {row.number('block_m') or 0:g}"
    if row.number("run_1stage"):
        return f"1stage {first}, {block}"
    split = row.number("ksplit")
    return f"{first} + {second}, {block}" + (f", ksplit {split:g}" if split else "")


# What is wrong with the tables


def _faults(
    tables: AiterTables, family: Family, target: Target, rows: list[Row]
) -> Iterator[tuple[str, list[Row]]]:
    """What is wrong with the rows of a file: texts, each with the rows that it is about."""
    arch, shapes_found = target.arch, tables.by_shape(family, target)
    not_found = [row for row in rows if row.is_block_fp8(fp8_of(arch)) and row.shape not in shapes_found]
    if of_other_units := [row for row in not_found if row.units != target.units]:
        shapes = {row.shape for row in of_other_units}
        many = f"{len(shapes)} shapes" if len(shapes) > 1 else "a shape"
        units = f"{of_other_units[0].units:g}"
        yield f"for {units} CUs, of {many} without rows for {target.units}", of_other_units
    if family is MOE:
        other_fp8 = fp8_of("gfx950" if arch == "gfx942" else "gfx942")
        if bad := [row for row in rows if other_fp8 in (row.cell("q_dtype_a"), row.cell("q_dtype_w"))]:
            yield f"of {other_fp8}, which {arch} never looks up", bad
        if bad := [row for row in rows if padded_tokens(int(row.m)) != row.m]:
            yield f"for {bad[0].m:g} tokens, which no number of tokens is padded to", bad
    if family is GEMM and (bad := [row for row in rows if row.cell("libtype") not in ("ck", "cktile", "")]):
        yield f"of libtype {bad[0].cell('libtype')}, which this GEMM refuses", bad
    yield from _unknown_names(tables.files, family, arch, rows)


def _unknown_names(
    files: Files, family: Family, arch: str, rows: list[Row]
) -> Iterator[tuple[str, list[Row]]]:
    """Rows whose kernels this AITER lacks. Those of CK Tile, CK's MoE and FlyDSL are not checked here."""
    if family is MOE:
        columns, folders = ["kernelName1", "kernelName2"], ["fmoe/*", "fmoe_2stages"]
        ck_names = set[str]()
    else:
        columns, folders = ["kernelName"], ["fp8gemm_blockscale"]
        ck_names = _ck_names(files, family)
    assembly_names = _assembly_names(files, arch, folders)
    bad = []
    for row in rows:
        for column in columns:
            name, known = row.cell(column), set[str]()
            if name.startswith("_ZN"):
                known = assembly_names
            elif row.cell("libtype") == "ck":
                known = ck_names
            may_exist = not known or name in known
            if name and not may_exist and not row.truncated:
                bad.append((row, name))
    if bad:
        _, first_name = bad[0]
        yield f"of kernel {first_name}, which this AITER does not have", [row for row, _ in bad]


def _assembly_names(files: Files, arch: str, folders: list[str]) -> set[str]:
    """The names of the assembly kernels; empty where their lists are missing. folders: those of the lists"""
    names = set()
    for root, folder in itertools.product(("hsa", "aiter_meta/hsa"), folders):
        for file in files.names(f"{root}/{arch}/{folder}/*.csv"):
            with contextlib.suppress(TableError, csv.Error):
                rows = csv.DictReader(io.StringIO(files.text(file), newline=""))
                names |= {row.get("knl_name") or "" for row in rows}
    return names


def _ck_names(files: Files, family: Family) -> set[str]:
    """The names of a family's CK kernels; empty where their list is missing or cannot be read."""
    names = set()
    for root in ("csrc", "aiter_meta/csrc"):
        try:
            text = files.text(f"{root}/{family.ck_list}") if files.has(f"{root}/{family.ck_list}") else ""
            for arguments in INSTANCE.findall(text):
                values = ast.literal_eval(f"({arguments})")
                texts = ["x".join(map(str, value)) if isinstance(value, list) else value for value in values]
                fields = zip(AITER["ck_fields"], texts, strict=False)
                names.add(family.ck_name.format_map(dict(fields)).lower())
        except (TableError, ValueError, SyntaxError, KeyError):
            return set()
    return names


def _unread(files: Files) -> Iterator[Problem]:
    """Files of model_configs/ that AITER never reads, because of their names."""
    try:
        core = files.text("aiter/jit/core.py")
    except TableError:
        return
    families = re.findall(r'"(\w+_tuned\w*|tuned_\w+)"', core)
    for file in files.names(f"{CONFIGS}/model_configs/*.csv"):
        name = file.rsplit("/", 1)[1]
        if families and "untuned" not in name and not any(family in name for family in families):
            yield Problem(file, 0, "is never read: its name does not contain the name of a table")
