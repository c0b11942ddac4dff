"""What AITER finds in its tuned tables for a GEMM or fused MoE of FP8 in blocks, and what it runs after a miss.

Source: `aiter/ops/gemm_op_a8w8.py` `get_CKGEMM_config`, `aiter/fused_moe.py` `get_2stage_cfgs`.
"""

from __future__ import annotations

import ast
import csv
import io
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from kernels.tables import Entry, Found, Problem
from kernels.tables.aiter_csv import GEMM, MOE, NUMBERS, PRESHUFFLED, UNITS, Family, Row, Table, rows_here
from kernels.tables.aiter_rules import power_of_two, read_rules
from kernels.tables.aiter_triton import TritonTables
from kernels.tables.files import TableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kernels.tables import Target
    from kernels.tables.files import Files

FORMATS = {"gfx942": "torch.float8_e4m3fnuz", "gfx950": "torch.float8_e4m3fn"}
"""The FP8 that AITER gives each architecture (`aiter/utility/dtypes.py`); others have e4m3fn."""

PEAK = {"gfx942": 2614.9 / 304, "gfx950": 5033.2 / 256}
"""Dense FP8 TFLOP/s of a CU: AMD's data sheets of MI300X and MI355X."""

DEFAULT_GEMM = (
    "CK a8w8_blockscale_1x128x128_256x16x128x256_16x16_16x16_1x2_16x16x1_16x16x1_1x16x1x16_8_1x2_intrawave_v1"
)
DEFAULT_PRESHUFFLED = "CK a8w8_blockscale_bpreshuffle_1x128x128_256x64x64x128_16x16_16x16_8x32x1_8x32x1_1x32x1x8_8_2x1_intrawave_v1"
"""One kernel for every shape without a row (csrc/ck_gemm_a8w8_blockscale*/*.cu, the `-1` instance)."""

INSTANCES = {
    GEMM: ("ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_instance.py", "a8w8_blockscale"),
    PRESHUFFLED: (
        "ck_gemm_a8w8_blockscale_bpreshuffle/gemm_a8w8_blockscale_bpreshuffle_common.py",
        "a8w8_blockscale_bpreshuffle",
    ),
}
LADDER = tuple(2**power for power in range(16))
"""M that a table is asked for whether it reaches: to 32768, the largest chunk of a prefill."""

MOE_HEADER = (
    "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
)


def padded(m: int, n: int) -> list[int]:
    """M as AITER looks for it, in order: itself, then twice padded (csrc/py_itfs_cu/gemm_common.cu)."""
    step = 16 if m <= 256 else 32 if m <= 1024 else 64 if m <= 4096 else 128
    coarse = 8192 if m > 8192 and n > 4096 else power_of_two(m)
    return list(dict.fromkeys((m, -(-m // step) * step, coarse)))


class AiterTables:
    """Tables of one copy of AITER, under the environment that the engine is started with."""

    def __init__(self, files: Files, environment: Mapping[str, str] | None = None) -> None:
        self.files, self.environment = files, environment or {}
        self.rules = read_rules(files)
        self._triton = TritonTables(files, self.rules)
        self._tables: dict[Family, Table] = {}
        self._shapes: dict[tuple[Family, Target], dict[tuple[float, ...], dict[int, list[Row]]]] = {}

    def gemm(self, target: Target, m: int, n: int, k: int, preshuffled: bool = False) -> Found:
        """`gemm_a8w8_blockscale`, or `gemm_a8w8_blockscale_bpreshuffle`: y [m, n] = x [m, k] w [n, k]^T."""
        family = PRESHUFFLED if preshuffled else GEMM
        table = self._table(family)
        shape = self._by_shape(family, target).get((n, k), {})
        if not table.dead:
            for tried in padded(m, n):
                if tried in shape:
                    row = min(shape[tried], key=_time)
                    gfx = f"{target.arch}," if table.has_gfx else ""
                    key = f"{gfx}{target.units},{tried},{n},{k}"
                    notes = [*_doubts(row, shape, tried, 2 * tried * n * k, target)]
                    if tried < m:
                        notes.append(f"tuned for {tried} rows, asked for {m}")
                    kernel = f"{row.cell('libtype')} {row.cell('kernelName') or 'kernelId ' + row.cell('kernelId')}"
                    if split := row.cell("splitK"):
                        kernel += f", splitK {split}"
                    entry = Entry(row.source.file, row.line, key, tried, kernel.strip(), row.us)
                    return Found(table.title, entry, notes=tuple(notes))
        fallback = DEFAULT_PRESHUFFLED if preshuffled else DEFAULT_GEMM
        if target.arch == "gfx1250":
            fallback = "AITER's Triton kernel"
        return Found(table.title, None, fallback, self._why(family, target, (n, k), shape, padded(m, n)))

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
        """`fused_moe` of FP8 in blocks (per_1x128), SiLU, gate and up together.

        experts: of this rank, as w1 has them; columns: of topk_ids; mask: an expert_mask is given (EP)
        """
        table = self._table(MOE)
        topk = columns - 1 if mask and self.rules.moe_strips else columns
        token = self.rules.token(tokens)
        fp8 = FORMATS.get(target.arch, "torch.float8_e4m3fn")
        shape = self._by_shape(MOE, target).get((hidden, inter, experts, topk), {})
        tiers = [tier for tier in reversed(self.rules.moe_tiers) if tier < token]
        notes = []
        bypass = self.environment.get("AITER_BYPASS_TUNE_CONFIG", "0").strip() not in ("", "0")
        for tried in () if table.dead else (token, *tiers):
            row = self._of_activation(shape.get(tried, []))
            if row is None:
                continue
            gfx = f"{target.arch}," if self.rules.moe_gfx else ""
            key = (
                f"{gfx}{target.units},{tried},{hidden},{inter},{experts},{topk},{fp8.removeprefix('torch.')}"
            )
            entry = Entry(row.source.file, row.line, key, tried, _moe_kernel(row), row.us)
            if bypass:
                notes.append(f"AITER_BYPASS_TUNE_CONFIG: {entry.file}:{entry.line} is not used")
                break
            notes += _doubts(row, shape, tried, 6 * tried * topk * hidden * inter, target)
            if row.texts[0] != "ActivationType.Silu":
                act = row.texts[0].removeprefix("ActivationType.")
                notes.append(f"a row of {act} answers: AITER does not compare act_type, and it comes first")
            if tried < tokens:
                notes.append(f"tuned for {tried} tokens, asked for {tokens}")
            return Found(table.title, entry, notes=tuple(notes))
        notes += self._why(MOE, target, (hidden, inter, experts, topk), shape, [token])
        return Found(
            table.title, None, self._moe_default(target, token, hidden, inter, experts, topk), tuple(notes)
        )

    def triton_gemm(self, target: Target, m: int, n: int, k: int, preshuffled: bool = False) -> Found:
        """The configuration of AITER's Triton kernel, `aiter/ops/triton/configs`."""
        return self._triton.gemm(target, m, n, k, preshuffled)

    def _of_activation(self, rows: list[Row]) -> Row | None:
        """Of rows that differ in act_type the one that SiLU gets."""
        same = [row for row in rows if row.texts[0] == "ActivationType.Silu"]
        if self.rules.moe_act != "blind" and same:
            return same[0]
        return rows[0] if rows and self.rules.moe_act != "exact" else None

    def _moe_default(
        self, target: Target, token: int, hidden: int, inter: int, experts: int, topk: int
    ) -> str:
        if token > 32 and inter % self.rules.one_stage == 0 and target.arch in FORMATS:
            return "1stage asm chosen by get_heuristic_kernel, block_m 32"
        split = self._split(target.units, token * topk, hidden, inter, experts)
        block_m = 64 if token > 32 else 16
        return f"2stage CK chosen by moe_stage1/2_heuristic_dispatch, block_m {block_m}, ksplit {split}"

    def _split(self, units: int, pairs: int, hidden: int, inter: int, experts: int) -> int:
        """`get_ksplit` of `aiter/fused_moe.py`."""
        forced = NUMBERS[self.environment.get("AITER_KSPLIT", "0")]
        if forced and forced == forced:
            return int(forced)
        tiles = pairs * -(-inter // 128)
        if not tiles or pairs > experts or tiles >= units:
            return 0
        splits = range(-(-units // tiles), 1, -1)
        return next((split for split in splits if hidden % split == 0 and hidden // split % 256 == 0), 0)

    def _table(self, family: Family) -> Table:
        if family not in self._tables:
            self._tables[family] = Table(self.files, family, self.rules, self.environment)
        return self._tables[family]

    def _by_shape(self, family: Family, target: Target) -> dict[tuple[float, ...], dict[int, list[Row]]]:
        """Rows that the target can find: by the key without M, then by M."""
        if (family, target) not in self._shapes:
            shapes: dict[tuple[float, ...], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
            for row in self._table(family).rows(target.arch):
                if row.numbers[0] == target.units and self._matches(family, row, target):
                    shape, m = _shape(family, row), row.numbers[1]
                    if all(size.is_integer() for size in (m, *shape)):  # NaN is none
                        shapes[shape][int(m)].append(row)
            self._shapes[family, target] = shapes
        return self._shapes[family, target]

    def _matches(self, family: Family, row: Row, target: Target) -> bool:
        """Whether the rest of the key is that of a call; act_type aside."""
        if family is not MOE:
            return True
        fp8 = FORMATS.get(target.arch, "torch.float8_e4m3fn")
        return row.texts[1:] == ("torch.bfloat16", fp8, fp8, "QuantType.per_1x128") and row.numbers[6:] == (
            1,
            0,
        )

    def _why(
        self,
        family: Family,
        target: Target,
        key: tuple[int, ...],
        shape: Mapping[int, list[Row]],
        tried: list[int],
    ) -> tuple[str, ...]:
        """Of a miss, where there are rows that one would expect to hit."""
        table = self._table(family)
        if table.dead:
            return (table.dead,)
        if shape:
            rows = (
                f"rows for M {min(shape)} to {max(shape)}" if len(shape) > 1 else f"a row for M {min(shape)}"
            )
            return (f"the shape has {rows}, none for {', '.join(map(str, tried))}",)
        others = {
            int(row.numbers[0])
            for row in table.rows(target.arch)
            if row.numbers[0] != target.units
            and row.numbers[0].is_integer()
            and _shape(family, row) == key
            and self._matches(family, row, target)
        }
        if others:
            return (f"the shape has rows for {', '.join(map(str, sorted(others)))} CUs, not {target.units}",)
        return ()

    def problems(self, target: Target) -> list[Problem]:
        """What is wrong with the tables, for this GPU: one line for each kind and file."""
        found = []
        if self.rules.assumed:
            found.append(
                Problem("aiter", 0, f"{self.rules.assumed}; the rules of v0.1.20 are assumed for the rest")
            )
        found += self._unread()
        for family in (GEMM, PRESHUFFLED, MOE):
            table = self._table(family)
            found += table.problems
            by_file = table.by_file(table.rows(target.arch))
            for file, rows in by_file.items():
                for text, bad in self._dead(family, target, rows):
                    found.append(Problem(file, bad[0].line, f"{rows_here(len(bad))} {text}"))
            found += self._ladders(family, target)
        return found + self._triton.problems(target)

    def _dead(self, family: Family, target: Target, rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
        """Rows of a file that cannot do what they are there for: what to say, and which."""
        arch = target.arch
        tuned = self._by_shape(family, target)
        others = [
            row
            for row in rows
            if row.numbers[0] != target.units and row.numbers[0] in UNITS.get(arch, {row.numbers[0]})
            if self._matches(family, row, target) and _shape(family, row) not in tuned
        ]
        if others:
            shapes = {_shape(family, row) for row in others}
            many = f"{len(shapes)} shapes" if len(shapes) > 1 else "a shape"
            yield f"for {_cell(others[0], 'cu_num')} CUs, of {many} without rows for {target.units}", others
        if family is MOE:
            yield from self._dead_moe(target, rows)
        elif family is GEMM and (
            bad := [row for row in rows if row.cell("libtype") not in ("ck", "cktile", "")]
        ):
            if any("libtype" in row.source.columns for row in bad):
                yield f"of libtype {bad[0].cell('libtype')}, which this GEMM asserts against", bad
        yield from self._unknown_names(family, arch, rows)

    def _dead_moe(self, target: Target, rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
        wrong = {fp8 for fp8 in FORMATS.values() if fp8 != FORMATS.get(target.arch, "torch.float8_e4m3fn")}
        if bad := [row for row in rows if row.texts[2] in wrong or row.texts[3] in wrong]:
            yield (
                f"of {wrong & set(bad[0].texts[2:4])}, which {target.arch} never asks for".translate(BRACES),
                bad,
            )
        reachable = {*LADDER, *self.rules.moe_tiers}
        if bad := [row for row in rows if row.numbers[1] not in reachable]:
            yield f"for {_cell(bad[0], 'token')} tokens, which no number of tokens is padded to", bad

    def _unknown_names(self, family: Family, arch: str, rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
        """Kernels that the checkout does not have. CK Tile, CK's MoE and FlyDSL are not known by name here."""
        folders = ("fmoe/*", "fmoe_2stages") if family is MOE else ("fp8gemm_blockscale",)
        assembled = self._assembled(arch, folders)
        built = self._built(family) if family in INSTANCES else set()
        columns = ("kernelName1", "kernelName2") if family is MOE else ("kernelName",)
        bad = []
        for row in rows:
            for column in columns:
                name = row.cell(column)
                known = (
                    assembled if name.startswith("_ZN") else built if row.cell("libtype") == "ck" else set()
                )
                if name and known and name not in known:
                    bad.append((row, name))
        if bad:
            yield f"of kernel {bad[0][1]}, which this AITER does not have", [row for row, _ in bad]

    def _assembled(self, arch: str, folders: tuple[str, ...]) -> set[str]:
        """Names in the lists of assembled kernels; empty where they are not there."""
        names = set()
        for root in ("hsa", "aiter_meta/hsa"):
            for folder in folders:
                for file in self.files.names(f"{root}/{arch}/{folder}/*.csv"):
                    try:
                        rows = csv.DictReader(io.StringIO(self.files.text(file), newline=""))
                        names |= {row.get("knl_name") or "" for row in rows}
                    except (TableError, csv.Error):
                        continue
        return names

    def _built(self, family: Family) -> set[str]:
        """Names of CK kernels, put together as `KernelInstance.name` does; empty where the list is not there."""
        file, prefix = INSTANCES[family]
        names = set()
        for root in ("csrc", "aiter_meta/csrc"):
            try:
                text = self.files.text(f"{root}/{file}") if self.files.has(f"{root}/{file}") else ""
                for call in re.findall(
                    r"^\s*\(?-?\d+\)?:\s*[kK]ernelInstance\((.*)\),?\s*$", text, re.MULTILINE
                ):
                    names.add(_instance(prefix, ast.literal_eval(f"({call})")))
            except (TableError, ValueError, SyntaxError, IndexError, TypeError, RecursionError, MemoryError):
                return set()
        return names

    def _ladders(self, family: Family, target: Target) -> Iterator[Problem]:
        """Shapes with rows of which none is found for some M."""
        if self._table(family).dead:
            return
        gaps: dict[str, list[tuple[list[int], tuple[float, ...], Row]]] = defaultdict(list)
        for key, by_m in self._by_shape(family, target).items():
            missed = [m for m in LADDER if not self._reached(family, m, key) & by_m.keys()]
            if missed and len(by_m) > 1:
                last = by_m[max(by_m)][0]
                gaps[last.source.file].append((missed, key, last))
        for file, shapes in gaps.items():
            missed, key, row = max(shapes, key=lambda shape: len(shape[0]))
            many = f"{len(shapes)} shapes have" if len(shapes) > 1 else "a shape has"
            name = "x".join(f"{part:g}" for part in key)
            what = "tokens" if family is MOE else "M"
            ms = ("" if len(missed) < 5 else "... ") + ", ".join(map(str, missed[-4:]))
            yield Problem(
                file, row.line, f"{many} rows, but not for every M: {name} has none for {what} {ms}"
            )

    def _reached(self, family: Family, m: int, key: tuple[float, ...]) -> set[int]:
        """M of the rows that a call with m rows asks for."""
        if family is not MOE:
            return set(padded(m, int(key[0])))
        token = self.rules.token(m)
        return {token, *(tier for tier in self.rules.moe_tiers if tier < token)}

    def _unread(self) -> Iterator[Problem]:
        """Files of model_configs/ that no table takes in."""
        try:
            core = self.files.text("aiter/jit/core.py")
        except TableError:
            return
        families = re.findall(r'"(\w*tuned\w*)"', core)
        for file in self.files.names("aiter/configs/model_configs/*.csv"):
            name = file.rsplit("/", 1)[1]
            if families and "untuned" not in name and not any(family in name for family in families):
                yield Problem(file, 0, "is never read: its name holds no name of a table")

    def untuned_gemm(self, shapes: Iterable[tuple[int, int, int]]) -> str:
        """(m, n, k) as the input of AITER's GEMM tuner. M stays as it is: AITER looks for it before padding."""
        return "M,N,K\n" + "".join(
            f"{m},{n},{k}\n" for m, n, k in sorted(set(shapes), key=lambda s: (s[1:], s[0]))
        )

    def untuned_moe(self, target: Target, calls: Iterable[tuple[int, int, int, int, int, bool]]) -> str:
        """(tokens, hidden, inter, experts, columns, mask), see `moe`, as the input of AITER's MoE tuner.

        Tokens are padded and topk is that of the key, else no look-up finds what is tuned.
        """
        fp8 = FORMATS.get(target.arch, "torch.float8_e4m3fn")
        rest = f"ActivationType.Silu,torch.bfloat16,{fp8},{fp8},QuantType.per_1x128,1,0"
        rows = {
            (hidden, inter, experts, columns - (mask and self.rules.moe_strips), self.rules.token(tokens))
            for tokens, hidden, inter, experts, columns, mask in calls
        }
        lines = (f"{row[-1]},{','.join(map(str, row[:-1]))},{rest}" for row in sorted(rows))
        return "\n".join((MOE_HEADER, *lines)) + "\n"


BRACES = str.maketrans("", "", "{}'")


def _shape(family: Family, row: Row) -> tuple[float, ...]:
    """The key without the GPU and M; of MoE without what is the same for every call."""
    return row.numbers[2:6] if family is MOE else row.numbers[2:]


def _time(row: Row) -> float:
    return float("inf") if row.us is None else row.us


def _cell(row: Row, column: str) -> str:
    return row.cell(column) or "nan"


def _moe_kernel(row: Row) -> str:
    """`1stage NAME`, or the names of both stages and what goes with them."""
    first, second = row.cell("kernelName1") or "default", row.cell("kernelName2") or "default"
    block = f"block_m {row.number('block_m') or 0:g}"
    if row.number("run_1stage"):
        return f"1stage {first}, {block}"
    split = row.number("ksplit")
    return f"{first} + {second}, {block}" + (f", ksplit {split:g}" if split else "")


def _doubts(row: Row, shape: Mapping[int, list[Row]], m: int, flops: int, target: Target) -> Iterator[str]:
    """Why the row's time was not measured there, or the row cannot be whole."""
    if row.truncated:
        yield "the row's line is cut short: AITER reads what lacks as nan"
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
        yield f"{us:g} us stands in the next row, too: a copied time"


def _instance(prefix: str, sizes: tuple[object, ...]) -> str:
    """`KernelInstance.name`: groups of its fields, joined; the waves are not in the preshuffled ones'."""
    waves = () if "bpreshuffle" in prefix else (sizes[11:13],)
    groups = (sizes[1:4], (sizes[0], *sizes[4:7]), sizes[7:9], sizes[9:11], *waves)
    lists = (sizes[13], sizes[14], sizes[17], sizes[18], sizes[15:17])
    parts = ["x".join(str(size) for size in group) for group in (*groups, *lists)]  # type: ignore[attr-defined]
    return "_".join((prefix, *parts, str(sizes[19]).lower(), f"v{sizes[20]}"))
