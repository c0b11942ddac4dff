"""The suite's own fused MoE in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernels.formats import BLOCK, SMALLEST_SCALE, fp8_format
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.fused_moe.triton.align import MOST_SEGMENTS, Alignment, tiles_for
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Target
from shapes.routing import Routing

if TYPE_CHECKING:
    import torch

WEIGHT_S, TOKEN_S, EXPERT_S = 1.3e-7, 3e-3, 15e-3
"""Seconds that the interpreter takes for a weight that a program reads, for combining a token, and for
placing an expert's pairs, on a busy Zen 4 core. With e4m3fnuz a weight takes half as long again."""

CHIPLETS = 8  # of gfx942 and gfx950
ROWS = (16, 32, 64, 128)
COMBINED = 1024  # columns that a program of the combine computes
FEW_COMBINED = 256  # the same below 32 tokens, which would otherwise be too few programs for a device
MIN_STEPS = 4
"""Blocks of K below which a split costs more than it gains: it writes a part and fills a pipeline."""
MOST_PROGRAMS = 1216  # programs that splits make on any device: four on each of an MI300X's 304 compute units
MOST_GROUP = 8  # tiles that take a block of columns before the next
ALONE = (1.5, 4)  # pairs of an expert, on average and at most, for which each pair may be a tile of its own
MANY = 8192  # blocks of h above which a program of SiLU takes eight


@dataclass(frozen=True)
class GroupedConfig:
    """What programs compute, and which launches there are."""

    rows: int  # pairs of one expert in a tile
    sort: bool = True  # brings pairs into the order of experts; else each is a tile, which saves a launch
    fuse: bool = True
    """Whether the up product goes on to h: a program computes gate and up for the 128 columns of one scale
    and for all of K. Else SiLU is a launch of its own."""

    columns: int = 128  # of gate and up together, where not fused; they divide 128
    per_unit: int = 1  # programs per compute unit that splits of K in the up product are to make
    down: int = 128  # columns of the down product
    by_token: bool = False  # the down product adds up a token's picks, where not sorted; else a launch does
    swap: bool = False  # computes the transposed tile: NVIDIA's instructions take at least 64 rows
    chiplets: int = 1  # chiplets of an AMD GPU to which programs go in turn; 1 elsewhere
    warps: int = 4
    stages: int = 3
    instruction: int = 0  # rows of AMD's matrix instruction; 0 elsewhere


# By the average rows of an expert. It was chosen by compiling, not yet by measuring.
HEURISTIC: dict[str, dict[float, GroupedConfig]] = {
    "cuda": {
        1.1: GroupedConfig(16, False, False, 64, 1, 64, by_token=True, swap=True, stages=5),
        16: GroupedConfig(16, swap=True, stages=3),
        32: GroupedConfig(32, swap=True, warps=8, stages=4),
        64: GroupedConfig(64, fuse=False, stages=4),
        math.inf: GroupedConfig(128, fuse=False, warps=8, stages=4),
    },
    "rocm": {
        1.1: GroupedConfig(
            16, False, False, 64, 1, 64, by_token=True, chiplets=CHIPLETS, stages=3, instruction=16
        ),
        16: GroupedConfig(16, chiplets=CHIPLETS, stages=2, instruction=16),
        32: GroupedConfig(32, chiplets=CHIPLETS, stages=2, instruction=16),
        64: GroupedConfig(64, fuse=False, chiplets=CHIPLETS, stages=2, instruction=16),
        math.inf: GroupedConfig(128, fuse=False, chiplets=CHIPLETS, stages=2, instruction=16),
    },
    # The interpreter's time depends on the number of programs and of weights that they read.
    "cpu": {
        16: GroupedConfig(16, down=1024),
        64: GroupedConfig(64, down=1024),
        math.inf: GroupedConfig(128, down=1024),
    },
}


class Grouped(SuiteTriton):
    """It sorts pairs by expert on the device, computes two grouped FP8 products with SiLU and requantising
    between them, and combines without atomics. Few pairs are not sorted, and K is split between programs.
    Grids have room for any picks, so that a call never waits for the host."""

    name = "triton.grouped"
    activations = "fp8"
    Config = GroupedConfig

    def configurations(self, target: Target, sizes: FusedMoeSizes) -> Iterator[GroupedConfig]:
        """Tiles between a quarter of and twice the average rows of an expert. Configurations that come to the
        same number of splits are given once."""
        mean = rows_of_expert(sizes)
        rows = [r for r in ROWS if r < 2 * max(16, mean) and r >= min(64, mean / 4)]
        few = _few(target, sizes) if _alone(sizes) else []
        for config in [*few, *itertools.chain.from_iterable(_sorted(target, sizes, r) for r in rows)]:
            small = config.rows < 64
            for warps in (4, 8) if config.sort else (4,):
                if target.kind != "rocm":
                    for stages in (3, 4, 5) if small else (3, 4):
                        yield replace(config, warps=warps, stages=stages, swap=small)
                    continue
                # One stage is in registers. The up product holds more than the down product.
                up = (config.rows + (2 * BLOCK if config.fuse else config.columns)) * BLOCK
                for stages, instruction in itertools.product((2, 3) if small else (1, 2), (16, 32)):
                    fits = up * (stages - 1) <= target.shared
                    if fits and (config.rows >= 2 * instruction or instruction == 16):
                        on = replace(config, chiplets=CHIPLETS, instruction=instruction)
                        yield replace(on, warps=warps, stages=stages)

    def heuristic(self, target: Target, sizes: FusedMoeSizes) -> GroupedConfig:
        rows, alone = rows_of_expert(sizes), _alone(sizes)
        of_kind = target.pick(HEURISTIC).items()
        return next(config for most, config in of_kind if rows <= most and (config.sort or alone))

    def features(self, sizes: FusedMoeSizes) -> dict[str, float | str]:
        """The average rows of an expert, how many experts are hit, and how large they are."""
        return {
            "rows": rows_of_expert(sizes),
            "hit": sizes.routed.hit,
            "hidden": sizes.hidden,
            "inter": sizes.inter,
            "fp8": sizes.fp8,
            "scales": sizes.scales,
        }

    def interpreted_s(self, sizes: FusedMoeSizes) -> float:
        tiles = tiles_of(self.heuristic(CPU, sizes), sizes)
        weights = tiles * 3 * sizes.hidden * sizes.inter * (1.5 if sizes.fp8 == "e4m3fnuz" else 1.0)
        return weights * WEIGHT_S + sizes.tokens * TOKEN_S + sizes.local_experts * EXPERT_S

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """An upper bound over all platforms and configurations."""
        pairs = sizes.tokens * sizes.picks
        gate_up = 2 * sizes.inter * max(2, 4 * most_splits(sizes))
        of_pair = gate_up + sizes.inter + sizes.inter // BLOCK * 4 + sizes.hidden * 2
        slots = max(tiles_for(rows, sizes) * (rows + 1) for rows in ROWS)
        return pairs * of_pair + 4 * (slots + (MOST_SEGMENTS + 1) * sizes.local_experts)

    def prepare_with(
        self, config: GroupedConfig, target: Target, operands: FusedMoeOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        return _GroupedMoe(operands, out, config, target.units)


def _alone(sizes: FusedMoeSizes) -> bool:
    """Whether nearly all pairs have an expert of their own."""
    mean, most = ALONE
    return rows_of_expert(sizes) <= mean and max(_loads(sizes.routed)) <= most


def _few(target: Target, sizes: FusedMoeSizes) -> Iterator[GroupedConfig]:
    for columns, down, by_token in itertools.product((64, 128), (64, 128), (True, False)):
        config = GroupedConfig(16, False, False, columns, 1, down, by_token)
        yield from _split(config, (1, 2, 4), target, sizes)


def _sorted(target: Target, sizes: FusedMoeSizes, rows: int) -> Iterator[GroupedConfig]:
    for down in (64, 128):
        yield GroupedConfig(rows, down=down)
        for columns in (64, 128):
            config = GroupedConfig(rows, fuse=False, columns=columns, down=down)
            yield from _split(config, (1, 2), target, sizes)


def _split(
    config: GroupedConfig, intensities: tuple[int, ...], target: Target, sizes: FusedMoeSizes
) -> Iterator[GroupedConfig]:
    by_splits: dict[int, GroupedConfig] = {}
    for per_unit in intensities:
        split = replace(config, per_unit=per_unit)
        by_splits.setdefault(splits_for(split, target.units, sizes), split)
    yield from by_splits.values()


def rows_of_expert(sizes: FusedMoeSizes) -> float:
    """The average rows of the experts that are hit."""
    return sizes.routed.pairs / max(1, sizes.routed.hit)


@functools.lru_cache(maxsize=256)
def _loads(routed: Routing) -> tuple[int, ...]:
    return tuple(routed.loads())


def tiles_of(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """The tiles that have work to do, with the picks of the routing."""
    if not config.sort:
        return sizes.routed.pairs
    return sum(math.ceil(load / config.rows) for load in _loads(sizes.routed))


def up_columns(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """Blocks of columns of the up product."""
    return sizes.inter // BLOCK if config.fuse else 2 * sizes.inter // config.columns


def down_columns(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """The configuration's columns, or the largest smaller power of two that divides hidden."""
    return next(n for n in (1024, 512, 256, 128, 64) if n <= config.down and sizes.hidden % n == 0)


def splits_for(config: GroupedConfig, units: int, sizes: FusedMoeSizes) -> int:
    """As many splits of the up product's K as give each compute unit its programs, if K has enough blocks.
    Each has a block."""
    if config.fuse:
        return 1
    blocks = sizes.hidden // BLOCK
    programs = max(1, tiles_of(config, sizes) * up_columns(config, sizes))
    most = min(units * config.per_unit, MOST_PROGRAMS)
    splits = max(1, min(most // programs, blocks // MIN_STEPS))
    return math.ceil(blocks / math.ceil(blocks / splits))


def most_splits(sizes: FusedMoeSizes) -> int:
    """The most splits of any configuration on any device. Each expert that is hit has a tile of at least one
    block of 128 columns, and so have as many rows as the largest tile has."""
    tiles = max(sizes.routed.hit, sizes.routed.pairs // ROWS[-1])
    least = max(1, tiles * (2 * sizes.inter // BLOCK))
    return max(1, min(MOST_PROGRAMS // least, sizes.hidden // BLOCK // MIN_STEPS))


def group_for(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """The average tiles of an expert, which read the same weights and are therefore neighbours."""
    mean = tiles_of(config, sizes) / max(1, sizes.routed.hit) if config.sort else 1
    return max(1, min(MOST_GROUP, round(mean)))


class _GroupedMoe(ConfiguredPrepared):
    operands: FusedMoeOperands

    def __init__(
        self, operands: FusedMoeOperands, out: torch.Tensor, config: GroupedConfig, units: int
    ) -> None:
        import torch
        import triton
        import triton.language as tl

        from kernels.fused_moe.triton import grouped_jit, pairs_jit

        super().__init__(operands, out)
        self.config = config
        sizes = operands.sizes
        hidden, inter = sizes.hidden, sizes.inter
        fmt = fp8_format(sizes.fp8)
        self.pairs = sizes.tokens * sizes.picks
        self.splits = splits_for(config, units, sizes)
        self.group = group_for(config, sizes)
        self.per_split = triton.cdiv(hidden // BLOCK, self.splits)
        narrow = torch.float32 if self.interpreted else torch.bfloat16

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=out.device)

        self.align = Alignment(sizes, config.rows, operands.topk_ids) if config.sort else None
        parts = 0 if config.fuse else self.splits
        self.gate_up = empty(parts, self.pairs, 2 * inter, dtype=torch.float32 if parts > 1 else narrow)
        self.h_q = empty(self.pairs, inter, dtype=fmt.dtype)
        self.h_scale = empty(self.pairs, inter // BLOCK)
        self.h_written = self.rounded_later(self.h_q)
        self.given = empty(0 if config.by_token else self.pairs, hidden, dtype=narrow)
        self.x_q, self.h_read = self.bits(operands.x_q), self.bits(self.h_q)
        self.w13, self.w2 = self.bits(operands.w13), self.bits(operands.w2)

        product = {"e4m3fn": tl.float8e4nv, "e4m3fnuz": tl.float8e4b8}[sizes.fp8]
        columns, steps = down_columns(config, sizes), inter // BLOCK
        tiles = tiles_for(config.rows, sizes) if config.sort else self.pairs
        shared = {
            "HIDDEN": hidden,
            "INTER": inter,
            "BLOCK": BLOCK,
            "BLOCK_M": config.rows,
            "SWAP": config.swap,
            "PRODUCT": tl.float32 if self.interpreted else product,
            "FNUZ_BITS": self.w2.dtype == torch.uint8,
        }
        tiled = {"SORTED": config.sort, "CHIPLETS": config.chiplets}
        rounding = {
            "LARGEST": fmt.max,
            "SMALLEST_SCALE": SMALLEST_SCALE,
            "POWER_OF_TWO": sizes.scales == "ue8m0",
        }
        self.up = grouped_jit.up_kernel[(tiles * up_columns(config, sizes), self.splits)]
        self.up_options: dict[str, object] = {
            **shared,
            **tiled,
            **rounding,
            "PICKS": sizes.picks,
            "BLOCK_N": BLOCK if config.fuse else config.columns,
            "FUSE": config.fuse,
            **options(config.warps, config.stages, config.instruction),
        }
        pairs_of_program = 8 if self.pairs * steps > MANY else 1
        self.silu = pairs_jit.silu_kernel[(triton.cdiv(self.pairs, pairs_of_program), steps)]
        self.silu_options = {
            **rounding,
            "INTER": inter,
            "SPLITS": self.splits,
            "BLOCK": BLOCK,
            "BLOCK_M": pairs_of_program,
            "num_warps": 4 if pairs_of_program > 1 else 1,
        }
        if config.by_token:
            self.down = grouped_jit.down_by_token_kernel[(hidden // columns, sizes.tokens)]
            # On NVIDIA the load that finds the expert takes half of the stages.
            stages = config.stages if config.instruction else 2 * config.stages
            own = {"PICKS": sizes.picks}
        else:
            self.down = grouped_jit.down_kernel[(tiles * (hidden // columns),)]
            stages, own = min(config.stages, steps + 1), tiled
        self.down_options = {
            **shared,
            **own,
            "BLOCK_N": columns,
            **options(config.warps, stages, config.instruction),
        }
        columns = COMBINED if sizes.tokens >= 32 else FEW_COMBINED
        self.combine = pairs_jit.combine_kernel[(sizes.tokens, triton.cdiv(hidden, columns))]
        self.combine_options = {
            "HIDDEN": hidden,
            "PICKS": sizes.picks,
            "PICKS_PADDED": triton.next_power_of_2(sizes.picks),
            "BLOCK_D": columns,
        }

    def launch(self) -> None:
        o, config = self.operands, self.config
        at: tuple[torch.Tensor | None, ...] = (o.topk_ids, None, None, None)
        if self.align:
            self.align()
            at = (o.topk_ids, *self.align.tensors)
        h = (self.h_written, self.h_scale)
        x = (self.x_q, o.x_scale, self.w13, o.w13_scale)
        self.up(*x, *at, self.gate_up, *h, self.pairs, self.group, self.per_split, **self.up_options)
        if not config.fuse:
            self.silu(self.gate_up, o.topk_ids, *h, self.pairs, **self.silu_options)
        if self.interpreted:
            self.h_q.copy_(self.h_written)
        product = (self.h_read, self.h_scale, self.w2, o.w2_scale)
        if config.by_token:
            self.down(*product, o.topk_ids, o.topk_weights, self.written, **self.down_options)
        else:
            self.down(*product, *at, self.given, self.pairs, self.group, **self.down_options)
            self.combine(self.given, o.topk_ids, o.topk_weights, self.written, **self.combine_options)
