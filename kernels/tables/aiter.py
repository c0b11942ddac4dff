"""What AITER finds in its tuned tables for GEMM and fused MoE with block FP8, and what it runs after a miss.

Source: `aiter/ops/gemm_op_a8w8.py` `get_CKGEMM_config`, `aiter/fused_moe.py` `get_2stage_cfgs`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from kernels.tables import Entry, Found
from kernels.tables.aiter_csv import GEMM, MOE, PRESHUFFLED, Family, Row, Table
from kernels.tables.aiter_problems import problems
from kernels.tables.aiter_rules import FORMATS, fp8_of, padded, read_rules
from kernels.tables.aiter_triton import TritonTables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kernels.tables import Problem, Target
    from kernels.tables.files import Files

Shapes = dict[tuple[float, ...], dict[int, list[Row]]]
"""Rows by shape (N, K or model_dim, inter_dim, expert, topk), then by M."""

PEAK = {"gfx942": 2614.9 / 304, "gfx950": 5033.2 / 256}
"""Dense FP8 TFLOP/s of a CU, by AMD's data sheets of MI300X and MI355X."""

DEFAULTS = {
    GEMM: "a8w8_blockscale_1x128x128_256x16x128x256_16x16_16x16_1x2_16x16x1_16x16x1_1x16x1x16_8_1x2"
    "_intrawave_v1",
    PRESHUFFLED: "a8w8_blockscale_bpreshuffle_1x128x128_256x64x64x128_16x16_16x16_8x32x1_8x32x1"
    "_1x32x1x8_8_2x1_intrawave_v1",
}
"""The CK kernel that AITER runs for a shape without a row: instance -1 of csrc/ck_gemm_a8w8_blockscale*/."""

MOE_HEADER = (
    "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
)


class AiterTables:
    """The tables of one copy of AITER. Each is read when it is first needed."""

    def __init__(self, files: Files, environment: Mapping[str, str] | None = None) -> None:
        """environment: the variables with which the engine is started."""
        self.files, self.environment = files, environment or {}
        self.rules = read_rules(files)
        self.triton = TritonTables(files, self.rules)
        self._tables: dict[Family, Table] = {}
        self._asked: dict[Family, set[tuple[int, ...]]] = defaultdict(set)
        self._shapes: dict[tuple[Family, Target], Shapes] = {}

    def asked(self, family: Family) -> set[tuple[int, ...]] | None:
        """The shapes of a family that were looked up. None, for all shapes, if none of any family was."""
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
        self._asked[family].add((n, k))
        by_m = self.by_shape(family, target).get((n, k), {})
        tried = padded(m, n)
        if (hit := next((each for each in tried if each in by_m), None)) is None:
            kernel = "AITER's Triton kernel" if target.arch == "gfx1250" else f"CK {DEFAULTS[family]}"
            return Found(table.title, None, kernel, self._why(family, target, (n, k), by_m, tried))
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
        topk, token = self.rules.topk(columns, mask), self.rules.token(tokens)
        shape = (hidden, inter, experts, topk)
        self._asked[MOE].add(shape)
        by_m = self.by_shape(MOE, target).get(shape, {})
        tiers = [tier for tier in reversed(self.rules.moe_tiers) if tier < token]
        default = self._moe_default(target, token, shape)
        for tried in (token, *tiers):
            if (row := self._of_silu(by_m.get(tried, []))) is None:
                continue
            if self.environment.get("AITER_BYPASS_TUNE_CONFIG", "0").strip() not in ("", "0"):
                note = f"AITER_BYPASS_TUNE_CONFIG: {row.source.file}:{row.line} is not used"
                return Found(table.title, None, default, (note,))
            fp8 = fp8_of(target.arch).removeprefix("torch.")
            key = ",".join(map(str, (target.units, tried, *shape, fp8)))
            key = f"{target.arch},{key}" if self.rules.moe_gfx else key
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
        """What is wrong with the tables for this GPU, one problem for each kind and file. If shapes were
        looked up before, only what concerns these."""
        found = problems(self, target)
        return found if self._asked and not self.triton.asked else found + self.triton.problems(target)

    def _of_silu(self, rows: list[Row]) -> Row | None:
        """The row that AITER uses for SiLU, of rows that differ only in act_type."""
        same = [row for row in rows if row.texts[0] == "ActivationType.Silu"]
        if self.rules.moe_act != "blind" and same:
            return same[0]
        return rows[0] if rows and self.rules.moe_act != "exact" else None

    def _moe_default(self, target: Target, token: int, shape: tuple[int, int, int, int]) -> str:
        if token > 32 and shape[1] % self.rules.one_stage == 0 and target.arch in FORMATS:
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
        """Shapes (m, n, k) as CSV for AITER's GEMM tuner. AITER looks for the exact m first, so it is not padded."""
        rows = sorted((n, k, m) for m, n, k in set(shapes))
        return "M,N,K\n" + "".join(f"{m},{n},{k}\n" for n, k, m in rows)

    def untuned_moe(self, target: Target, calls: Iterable[tuple[int, int, int, int, int, bool]]) -> str:
        """Calls (tokens, hidden, inter, experts, columns, mask: see `moe`) as CSV for AITER's MoE tuner.

        Tokens are padded and topk is that of the key. Otherwise no look-up would find what is tuned.
        """
        fp8 = fp8_of(target.arch)
        rest = f"ActivationType.Silu,torch.bfloat16,{fp8},{fp8},QuantType.per_1x128,1,0"
        rows = {
            (hidden, inter, experts, self.rules.topk(columns, mask), self.rules.token(tokens))
            for tokens, hidden, inter, experts, columns, mask in calls
        }
        lines = (f"{row[-1]},{','.join(map(str, row[:-1]))},{rest}" for row in sorted(rows))
        return "\n".join((MOE_HEADER, *lines)) + "\n"


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
