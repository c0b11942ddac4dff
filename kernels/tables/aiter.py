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
from typing import TYPE_CHECKING

from kernels.tables import Entry, Found, Problem
from kernels.tables.aiter_csv import CONFIGS, GEMM, MOE, PRESHUFFLED, UNITS, Family, Row, Table, rows_here
from kernels.tables.aiter_triton import TritonTables
from kernels.tables.files import RECORDED, TableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kernels.tables.files import Files
    from kernels.tuning import Target

Shapes = dict[tuple[float, ...], dict[int, list[Row]]]
"""Rows by shape (N, K or model_dim, inter_dim, expert, topk), then by M."""

FORMATS = {"gfx942": "torch.float8_e4m3fnuz", "gfx950": "torch.float8_e4m3fn"}
"""FP8 formats by architecture (`aiter/utility/dtypes.py`). All others have e4m3fn."""

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

MOE_HEADER = (
    "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
)


class AiterTables:
    """The tables of one copy of AITER. Each is read when it is first needed."""

    def __init__(self, files: Files, environment: Mapping[str, str] | None = None) -> None:
        """environment: the variables with which the engine is started."""
        self.files, self.environment = files, environment or {}
        self.triton = TritonTables(files)
        self._tables: dict[Family, Table] = {}
        self.asked: dict[Family, set[tuple[float, ...]]] = defaultdict(set)
        """By family, the shapes that were looked up."""
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
        table = self.table(family)
        self.asked[family].add((n, k))
        by_m = self.by_shape(family, target).get((n, k), {})
        tried = padded(m, n)
        if (hit := next((each for each in tried if each in by_m), None)) is None:
            why = self._why(family, target, (n, k), by_m, tried)
            return Found(table.title, None, f"CK {DEFAULTS[family]}", why)
        row = by_m[hit][0]
        name = row.cell("kernelName") or f"kernelId {row.cell('kernelId')}"
        kernel = f"{row.cell('libtype')} {name}".strip()
        if split := row.cell("splitK"):
            kernel += f", splitK {split}"
        key = f"{target.units},{hit},{n},{k}"
        key = f"{target.arch},{key}" if table.has_gfx else key
        notes = [*_doubts(row, by_m, hit, 2 * hit * n * k, target), *_smaller(hit, m), table.raises]
        entry = Entry(row.source.file, row.line, key, hit, kernel, row.us)
        return Found(table.title, entry, notes=tuple(filter(None, notes)))

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
        table = self.table(MOE)
        topk, token = columns - int(mask), padded_tokens(tokens)
        shape = (hidden, inter, experts, topk)
        self.asked[MOE].add(shape)
        by_m = self.by_shape(MOE, target).get(shape, {})
        tiers = [tier for tier in reversed(MOE_TIERS) if tier < token]
        default = self._moe_default(target, token, shape)
        for tried in (token, *tiers):
            if not (rows := by_m.get(tried, [])):
                continue
            row = rows[0]
            if self.environment.get("AITER_BYPASS_TUNE_CONFIG", "0").strip() not in ("", "0"):
                note = f"AITER_BYPASS_TUNE_CONFIG: {row.source.file}:{row.line} is not used"
                return Found(table.title, None, default, (note,))
            fp8 = fp8_of(target.arch).removeprefix("torch.")
            key = ",".join(map(str, (target.arch, target.units, tried, *shape, fp8)))
            notes = [*_doubts(row, by_m, tried, 6 * tried * topk * hidden * inter, target)]
            if row.texts[0] != "ActivationType.Silu":
                act = row.cell("act_type").removeprefix("ActivationType.")
                notes.append(
                    f"a row of {act} is used: AITER does not compare act_type, and this row comes first"
                )
            notes += [*_smaller(tried, tokens), table.raises]
            entry = Entry(row.source.file, row.line, key, tried, _moe_kernel(row), row.us)
            return Found(table.title, entry, notes=tuple(filter(None, notes)))
        return Found(table.title, None, default, self._why(MOE, target, shape, by_m, [token]))

    def problems(self, target: Target) -> list[Problem]:
        """What is wrong with the tables for this GPU, one problem for each kind and file. Only what concerns
        the shapes that were looked up counts."""
        return _problems(self, target) + self.triton.problems(target)

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

    def _why(
        self,
        family: Family,
        target: Target,
        shape: tuple[int, ...],
        by_m: Mapping[int, list[Row]],
        tried: list[int],
    ) -> tuple[str, ...]:
        """Why a look-up missed, if there are rows that seem to match."""
        table = self.table(family)
        if table.raises or table.dead:
            return (table.raises or table.dead,)
        if by_m:
            rows = f"rows for M {min(by_m)} to {max(by_m)}" if len(by_m) > 1 else f"a row for M {min(by_m)}"
            return (f"the shape has {rows}, none for {', '.join(map(str, tried))}",)
        others = {
            f"{row.units:g}"
            for row in table.rows(target.arch)
            if row.units != target.units and row.shape == shape and row.is_block_fp8(fp8_of(target.arch))
        }
        if others:
            return (f"the shape has rows for {', '.join(sorted(others))} CUs, not {target.units}",)
        keys = {other[2:] for other in self.by_shape(family, target) if other[:2] == shape[:2]}
        if keys:
            said = ", ".join(f"{experts:g} experts with topk {topk:g}" for experts, topk in sorted(keys))
            return (f"there are rows for {said}, not {shape[2]} with {shape[3]}",)
        return ()

    def untuned_gemm(self, shapes: Iterable[tuple[int, int, int]]) -> str:
        """Shapes (m, n, k) as CSV for AITER's GEMM tuner. AITER looks for the exact m first."""
        rows = sorted((n, k, m) for m, n, k in set(shapes))
        return "M,N,K\n" + "".join(f"{m},{n},{k}\n" for n, k, m in rows)

    def untuned_moe(self, target: Target, calls: Iterable[tuple[int, int, int, int, int, bool]]) -> str:
        """Calls (tokens, hidden, inter, experts, columns, mask: see `moe`) as CSV for AITER's MoE tuner.

        Tokens are padded and topk is that of the key. Otherwise no look-up would find what is tuned.
        """
        fp8 = fp8_of(target.arch)
        rest = f"ActivationType.Silu,torch.bfloat16,{fp8},{fp8},QuantType.per_1x128,1,0"
        rows = {
            (hidden, inter, experts, columns - int(mask), padded_tokens(tokens))
            for tokens, hidden, inter, experts, columns, mask in calls
        }
        lines = (f"{row[-1]},{','.join(map(str, row[:-1]))},{rest}" for row in sorted(rows))
        return "\n".join((MOE_HEADER, *lines)) + "\n"


def fp8_of(arch: str) -> str:
    return FORMATS.get(arch, "torch.float8_e4m3fn")


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


def _smaller(hit: int, m: int) -> list[str]:
    return [f"tuned for {hit} rows, asked for {m}"] if hit < m else []


def _moe_kernel(row: Row) -> str:
    """`1stage NAME, block_m 32`, or the names of both stages with block_m and ksplit."""
    first, second = row.cell("kernelName1") or "default", row.cell("kernelName2") or "default"
    block = f"block_m {row.number('block_m') or 0:g}"
    if row.number("run_1stage"):
        return f"1stage {first}, {block}"
    split = row.number("ksplit")
    return f"{first} + {second}, {block}" + (f", ksplit {split:g}" if split else "")


def _doubts(row: Row, shape: Mapping[int, list[Row]], m: int, flops: int, target: Target) -> Iterator[str]:
    """What is doubtful about a row: it is cut short, or its time cannot be that of its M.

    shape: the rows of the shape, by M
    flops: those of the call at M
    """
    if row.truncated:
        yield "the row's line is cut short: AITER reads the missing cells as nan"
    us, peak = row.us, PEAK.get(target.arch, 0.0) * target.units
    if "us" not in row.source.columns:
        return
    if not us or us <= 0:
        yield "the row has no time"
        return
    rate = flops / us / 1e6
    if peak and rate > peak:
        yield f"{us:g} us would be {rate:.0f} TFLOP/s, above the peak of {peak:.0f}"
    places = sorted(shape)
    here = places.index(m)
    beside = [other for other in places[max(0, here - 1) : here + 2] if other != m]
    if any(other.us == us and other.texts == row.texts for near in beside for other in shape[near]):
        yield f"{us:g} us is in the next row, too: a copied time"


# What is wrong with the tables


def _problems(tables: AiterTables, target: Target) -> list[Problem]:
    """What is wrong with the tables that were asked: with their files, then with their rows for this GPU."""
    found = []
    if reason := older(tables.files):
        found.append(Problem("aiter", 0, f"{reason}: the look-ups may differ from its own"))
    found += _unread(tables.files)
    for family in (GEMM, PRESHUFFLED, MOE):
        asked = tables.asked[family]
        if not asked:
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
            if row.shape in asked:
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
        reachable = {*LADDER, *MOE_TIERS}
        if bad := [row for row in rows if row.m not in reachable]:
            yield f"for {bad[0].m:g} tokens, which no number of tokens is padded to", bad
    if family is GEMM and (bad := [row for row in rows if row.cell("libtype") not in ("ck", "cktile", "")]):
        yield f"of libtype {bad[0].cell('libtype')[:20]}, which this GEMM refuses", bad
    yield from _unknown_names(tables.files, family, arch, rows)


def _gaps(tables: AiterTables, family: Family, target: Target) -> Iterator[Problem]:
    """Shapes that have rows, but for some M none that a look-up finds."""
    gaps: dict[str, list[tuple[list[int], Row]]] = defaultdict(list)
    for shape, by_m in tables.by_shape(family, target).items():
        if shape not in tables.asked[family]:
            continue
        missed = []
        for m in LADDER:
            asked = [padded_tokens(m)] if family is MOE else padded(m, int(shape[0]))
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
