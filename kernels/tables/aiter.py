"""What AITER finds in its tuned tables for GEMM and fused MoE with block FP8, what it runs after a miss, and
what is wrong with the tables.

Source: `aiter/ops/gemm_op_a8w8.py` `get_CKGEMM_config`, `aiter/fused_moe.py` `get_2stage_cfgs` of commit
e404860 (v0.1.21.dev0). v0.1.19 and v0.1.20 look up in the same way. Older releases differ in the key of MoE,
and in what a merge does with gfx and with equal keys. `older` finds them, and a problem says so.
"""

from __future__ import annotations

import ast
import csv
import io
import re
from collections import defaultdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from kernels.formats import native
from kernels.tables import Entry, Found, Problem
from kernels.tables.aiter_csv import CONFIGS, GEMM, MOE, PRESHUFFLED, Family, Row, Table, rows_here
from kernels.tables.aiter_triton import TritonTables
from kernels.tables.files import RECORDED, TableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kernels.tables.files import Files
    from kernels.tuning import Target

Shapes = dict[tuple[float, ...], dict[int, list[Row]]]
"""Rows by shape (N, K or model_dim, inter_dim, expert, topk), then by M."""

MOE_TIERS = (32768, 131072)
"""From the first of these on, tokens are rounded down to one of these in the key of MoE. Below, they are
rounded up to a power of two."""

PEAK = {"gfx942": 2614.9 / 304, "gfx950": 5033.2 / 256}
"""Dense FP8 TFLOP/s of a CU, by AMD's data sheets of MI300X and MI355X."""

DEFAULTS = {
    GEMM: "a8w8_blockscale_1x128x128_256x16x128x256_16x16_16x16_1x2_16x16x1_16x16x1_1x16x1x16_8_1x2"
    "_intrawave_v1",
    PRESHUFFLED: "a8w8_blockscale_bpreshuffle_1x128x128_256x64x64x128_16x16_16x16_8x32x1_8x32x1"
    "_1x32x1x8_8_2x1_intrawave_v1",
}
"""The CK kernel that AITER runs for a shape without a row: instance -1 of csrc/ck_gemm_a8w8_blockscale*/."""

INSTANCES = {
    GEMM.name: ("ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_instance.py", "a8w8_blockscale"),
    PRESHUFFLED.name: (
        "ck_gemm_a8w8_blockscale_bpreshuffle/gemm_a8w8_blockscale_bpreshuffle_common.py",
        "a8w8_blockscale_bpreshuffle",
    ),
}
"""By family, the file in csrc/ that lists its CK kernels, and how their names begin."""

INSTANCE = re.compile(r"^\s*\(?-?\d+\)?:\s*[kK]ernelInstance\((.*)\),?\s*$", re.MULTILINE)


class AiterTables:
    """The tables of one copy of AITER. Each is read when it is first needed."""

    def __init__(self, files: Files, environment: Mapping[str, str] | None = None) -> None:
        """environment: the variables with which the engine is started."""
        self.files, self.environment = files, environment or {}
        self.triton = TritonTables(files)
        self._tables: dict[Family, Table] = {}
        self.asked: dict[Family, set[tuple[float, ...]]] = defaultdict(set)
        """By family, the shapes that were looked up."""
        self._missed: dict[Family, set[tuple[int, ...]]] = defaultdict(set)
        """By family, what was looked up in vain, as (*shape, M)."""
        self._shapes: dict[tuple[Family, Target], Shapes] = {}

    def table(self, family: Family) -> Table:
        if family not in self._tables:
            self._tables[family] = Table(self.files, family, self.environment)
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
                    and all(size.is_integer() for size in (row.m, *row.shape))  # NaN is no integer
                ):
                    shapes[row.shape][int(row.m)].append(row)
            self._shapes[family, target] = shapes
        return self._shapes[family, target]

    def gemm(self, target: Target, m: int, n: int, k: int, preshuffled: bool = False) -> Found:
        """Looks up y [m, n] = x [m, k] w [n, k]^T as `gemm_a8w8_blockscale` does, or, with a preshuffled w,
        as `gemm_a8w8_blockscale_bpreshuffle` does."""
        family = PRESHUFFLED if preshuffled else GEMM
        table, tried = self.table(family), padded(m, n)
        row, missed = self._row(family, target, (n, k), tried, tried)
        if row is None:
            return Found(table.title, None, f"CK {DEFAULTS[family]}", missed)
        hit = int(row.m)
        name = row.cell("kernelName") or f"kernelId {row.cell('kernelId')}"
        kernel = f"{row.cell('libtype')} {name}".strip()
        if split := row.cell("splitK"):
            kernel += f", splitK {split}"
        key = f"{target.units},{hit},{n},{k}"
        key = f"{target.arch},{key}" if table.has_gfx else key
        return self._found(table, row, key, kernel, m, self._doubts(row, family, target, 2 * hit * n * k))

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

        experts: how many experts w1 of this rank has
        columns: how many columns topk_ids has
        mask:    whether an expert_mask is passed, as with EP
        """
        table, topk, token = self.table(MOE), columns - int(mask), padded_tokens(tokens)
        shape = (hidden, inter, experts, topk)
        tiers = [tier for tier in reversed(MOE_TIERS) if tier < token]
        default = self._moe_default(target, token, shape)
        row, missed = self._row(MOE, target, shape, [token, *tiers], [token])
        if row is None:
            return Found(table.title, None, default, missed)
        if self.environment.get("AITER_BYPASS_TUNE_CONFIG", "0").strip() not in ("", "0"):
            self._missed[MOE].add((*shape, token))
            note = f"AITER_BYPASS_TUNE_CONFIG: {row.file}:{row.line} is not used"
            return Found(table.title, None, default, (note,))
        hit, fp8 = int(row.m), fp8_of(target.arch).removeprefix("torch.")
        key = ",".join(map(str, (target.arch, target.units, hit, *shape, fp8)))
        notes = [*self._doubts(row, MOE, target, 6 * hit * topk * hidden * inter)]
        if row.texts[0] != "ActivationType.Silu":
            act = row.cell("act_type").removeprefix("ActivationType.")
            notes.append(f"a row of {act} is used: AITER does not compare act_type, and this row comes first")
        return self._found(table, row, key, _moe_kernel(row), tokens, notes)

    def _row(
        self, family: Family, target: Target, shape: tuple[int, ...], tried: list[int], said: list[int]
    ) -> tuple[Row | None, tuple[str, ...]]:
        """The row that AITER finds, or None and why it finds none, if there are rows that seem to match.

        tried: the M that are looked up, in order; said: those that a miss names
        """
        table = self.table(family)
        self.asked[family].add(shape)
        by_m = self.by_shape(family, target).get(shape, {})
        if hit := [m for m in tried if by_m.get(m)]:
            return by_m[hit[0]][0], ()
        self._missed[family].add((*shape, tried[0]))
        if table.raises or table.dead:
            return None, (table.raises or table.dead,)
        if by_m:
            rows = f"rows for M {min(by_m)} to {max(by_m)}" if len(by_m) > 1 else f"a row for M {min(by_m)}"
            return None, (f"the shape has {rows}, none for {', '.join(map(str, said))}",)
        others = {
            f"{row.units:g}"
            for row in table.rows(target.arch)
            if row.units != target.units and row.shape == shape and row.is_block_fp8(fp8_of(target.arch))
        }
        if others:
            return None, (f"the shape has rows for {', '.join(sorted(others))} CUs, not {target.units}",)
        if keys := {other[2:] for other in self.by_shape(family, target) if other[:2] == shape[:2]}:
            rows = ", ".join(f"{experts:g} experts with topk {topk:g}" for experts, topk in sorted(keys))
            return None, (f"there are rows for {rows}, not {shape[2]} with {shape[3]}",)
        return None, ()

    def _found(
        self, table: Table, row: Row, key: str, kernel: str, asked: int, notes: Iterable[str]
    ) -> Found:
        """asked: the number of rows of the call"""
        hit = int(row.m)
        if hit < asked:
            notes = [*notes, f"tuned for {hit} rows, asked for {asked}"]
        notes = tuple(filter(None, (*notes, table.raises)))
        return Found(table.title, Entry(row.file, row.line, key, hit, kernel, row.us), notes=notes)

    def _doubts(self, row: Row, family: Family, target: Target, flops: int) -> Iterator[str]:
        """What is doubtful about a row: it is cut short, or its time cannot be that of its M. flops: those of
        the call at its M"""
        if row.truncated:
            yield "the row's line is cut short: AITER reads the missing cells as nan"
        us, peak = row.us, PEAK.get(target.arch, 0.0) * target.units
        if "us" not in row.cells:
            return
        if not us or us <= 0:
            yield "the row has no time"
            return
        rate = flops / us / 1e6
        if peak and rate > peak:
            yield f"{us:g} us would be {rate:.0f} TFLOP/s, above the peak of {peak:.0f}"
        by_m = self.by_shape(family, target)[row.shape]
        places = sorted(by_m)
        here = places.index(int(row.m))
        beside = [*places[max(0, here - 1) : here], *places[here + 1 : here + 2]]
        if any(other.us == us and other.texts == row.texts for near in beside for other in by_m[near]):
            yield f"{us:g} us is in the next row, too: a copied time"

    def problems(self, target: Target) -> list[Problem]:
        """What is wrong with the tables for this GPU, one problem for each kind and file. Only what concerns
        the shapes that were looked up counts."""
        found = []
        if reason := older(self.files):
            found.append(Problem("aiter", 0, f"{reason}: the look-ups may differ from its own"))
        found += _unread(self.files)
        for family in (GEMM, PRESHUFFLED, MOE):
            asked = self.asked[family]
            if not asked:
                if self.environment.get(family.variable):
                    text = "no kernel of this deployment looks into its table"
                    found.append(Problem(family.variable, 0, text))
                continue
            found += self.table(family).problems
            by_file = defaultdict(list)
            for row in self.table(family).rows(target.arch):
                if row.shape in asked and row.m.is_integer():
                    by_file[row.file].append(row)
            for file, rows in by_file.items():
                for text, bad in _dead(self, family, target, rows):
                    found.append(Problem(file, bad[0].line, f"{rows_here(len(bad))} {text}"))
        return found + self.triton.problems(target)

    def _moe_default(self, target: Target, token: int, shape: tuple[int, int, int, int]) -> str:
        if token > 32 and shape[1] % 128 == 0:
            return "1stage asm chosen by get_heuristic_kernel, block_m 32"
        block_m, split = 64 if token > 32 else 16, self._split(target.units, token, *shape)
        return f"2stage CK chosen by moe_stage1/2_heuristic_dispatch, block_m {block_m}, ksplit {split}"

    def _split(self, units: int, token: int, hidden: int, inter: int, experts: int, topk: int) -> int:
        """Into how many parts `get_ksplit` of `aiter/fused_moe.py` splits hidden; 0 for no split."""
        forced = self.environment.get("AITER_KSPLIT", "0").strip()
        if forced.lstrip("-").isdecimal() and int(forced):
            return int(forced)
        tiles = token * topk * -(-inter // 128)
        if not tiles or token * topk > experts or tiles >= units:
            return 0
        splits = range(-(-units // tiles), 1, -1)
        return next((split for split in splits if hidden % split == 0 and hidden // split % 256 == 0), 0)

    def untuned(self, target: Target) -> dict[str, str]:
        """CSV files of the shapes that were missed, by name, as AITER's tuners read them. GEMM has the exact
        M, which AITER looks for first; MoE has tokens as padded and topk as looked up, as no look-up would
        find anything else."""
        fp8, texts = fp8_of(target.arch), {}
        for family, missed in self._missed.items():
            columns, rest = family.numbers[1:4], ""
            if family is MOE:
                columns = (*MOE.numbers[1:6], *MOE.texts, *MOE.numbers[6:])
                rest = f",ActivationType.Silu,torch.bfloat16,{fp8},{fp8},QuantType.per_1x128,1,0"
            lines = [f"{','.join(map(str, (row[-1], *row[:-1])))}{rest}" for row in sorted(missed)]
            name = PurePosixPath(family.untuned).name
            texts[name] = "".join(f"{line}\n" for line in (",".join(columns), *lines))
        return texts


def fp8_of(arch: str) -> str:
    """The FP8 format of an architecture, as `aiter/utility/dtypes.py` has it."""
    return f"torch.float8_{native(arch)}"


def padded(m: int, n: int) -> list[int]:
    """The M for which a GEMM is looked up, in order: m, then two paddings of it (`getPaddedM` of
    csrc/py_itfs_cu/gemm_common.cu)."""
    step = next((step for most, step in ((256, 16), (1024, 32), (4096, 64)) if m <= most), 128)
    coarse = 8192 if m > 8192 and n > 4096 else power_of_two(m)
    return list(dict.fromkeys((m, -(-m // step) * step, coarse)))


def padded_tokens(tokens: int) -> int:
    """The number of tokens in the key of MoE, as `get_padded_M` of `aiter/fused_moe.py` returns it."""
    return max((tier for tier in MOE_TIERS if tokens >= tier), default=power_of_two(tokens))


def power_of_two(m: int) -> int:
    """The smallest power of two that is at least m."""
    return 1 << max(m - 1, 0).bit_length()


def older(files: Files) -> str:
    """Says that the look-ups of this copy may be others than those here; empty where its source has them, and
    for the recorded extracts."""
    if files.path.parent == RECORDED:
        return ""
    texts = {}
    for name in ("jit/core.py", "fused_moe.py"):
        try:
            texts[name] = files.text(f"aiter/{name}")
        except TableError:
            return f"it has no readable {name}"
    moe = texts["fused_moe.py"]
    is_known = "gfx_from_cu_num" in texts["jit/core.py"] and "_PADDED_M_TIERS" in moe
    compares_act = re.search(r"^ +str\(activation\),$", moe, re.MULTILINE)
    is_tagged = '["_tag"].fillna("") == ""' in moe
    return "" if is_known and not compares_act and not is_tagged else "older than v0.1.19"


def _moe_kernel(row: Row) -> str:
    """`1stage NAME, block_m 32`, or the names of both stages with block_m and ksplit."""
    first, second = row.cell("kernelName1") or "default", row.cell("kernelName2") or "default"
    block = f"block_m {row.number('block_m') or 0:g}"
    if row.number("run_1stage"):
        return f"1stage {first}, {block}"
    split = row.number("ksplit")
    return f"{first} + {second}, {block}" + (f", ksplit {split:g}" if split else "")


# What is wrong with the tables


def _dead(
    tables: AiterTables, family: Family, target: Target, rows: list[Row]
) -> Iterator[tuple[str, list[Row]]]:
    """What is wrong with the rows of a file: texts, each with the rows that it is about."""
    arch, tuned = target.arch, tables.by_shape(family, target)
    others = [
        row
        for row in rows
        if row.units != target.units and row.is_block_fp8(fp8_of(arch)) and row.shape not in tuned
    ]
    if others:
        shapes = {row.shape for row in others}
        many = f"{len(shapes)} shapes" if len(shapes) > 1 else "a shape"
        yield f"for {others[0].units:g} CUs, of {many} without rows for {target.units}", others
    if family is MOE:
        (other,) = {fp8_of("gfx942"), fp8_of("gfx950")} - {fp8_of(arch)}
        if bad := [row for row in rows if other in row.texts[2:4]]:
            yield f"of {other}, which {arch} never looks up", bad
        if bad := [row for row in rows if padded_tokens(int(row.m)) != row.m]:
            yield f"for {bad[0].m:g} tokens, which no number of tokens is padded to", bad
    if family is GEMM and (bad := [row for row in rows if row.cell("libtype") not in ("ck", "cktile", "")]):
        yield f"of libtype {bad[0].cell('libtype')}, which this GEMM refuses", bad
    yield from _unknown_names(tables.files, family, arch, rows)


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
        yield f"of kernel {bad[0][1]}, which this AITER does not have", [row for row, _ in bad]


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
        except (TableError, ValueError, SyntaxError, IndexError):
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
    """Files of model_configs/ that no family reads."""
    try:
        core = files.text("aiter/jit/core.py")
    except TableError:
        return
    families = re.findall(r'"(\w+_tuned\w*|tuned_\w+)"', core)
    for file in files.names(f"{CONFIGS}/model_configs/*.csv"):
        name = file.rsplit("/", 1)[1]
        if families and "untuned" not in name and not any(family in name for family in families):
            yield Problem(file, 0, "is never read: its name does not contain the name of a table")
