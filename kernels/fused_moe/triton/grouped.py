"""The suite's own fused MoE in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kernels.formats import BLOCK
from kernels.fused_moe.layouts import MOST_SEGMENTS, Alignment, combination, rounding, tiles_for
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes
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


class Grouped(SuiteTriton):
    """It sorts pairs by expert on the device, computes two grouped FP8 products with SiLU and requantising
    between them, and combines without atomics. Few pairs are not sorted, and K is split between programs.
    Grids have room for any picks, so that a call never waits for the host."""

    name = "triton.grouped"
    activations = "fp8"
    Config = GroupedConfig

    def configurations(self, target: Target, sizes: FusedMoeSizes) -> Iterator[GroupedConfig]:
        if target.kind == "cpu":
            # The interpreter's time depends on the number of programs and of weights that they read.
            mean = rows_of_expert(sizes)
            yield GroupedConfig(16 if mean <= 16 else 64 if mean <= 64 else 128, down=1024)
            return
        for config in _tiles(target, sizes):
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

    def features(self, sizes: FusedMoeSizes) -> dict[str, float | str]:
        """The average rows of an expert, how many experts are hit, and how large they are."""
        named = {name: getattr(sizes, name) for name in ("hidden", "inter", "fp8", "scales")}
        return {"rows": rows_of_expert(sizes), "hit": sizes.routed.hit, **named}

    def interpreted_s(self, sizes: FusedMoeSizes) -> float:
        tiles = tiles_of(next(self.configurations(CPU, sizes)), sizes)
        weights = tiles * sizes.expert_values * (1.5 if sizes.fp8 == "e4m3fnuz" else 1.0)
        return weights * WEIGHT_S + sizes.tokens * TOKEN_S + sizes.local_experts * EXPERT_S

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """An upper bound over all platforms and configurations. Splits are limited by MOST_PROGRAMS: each
        expert that is hit has a tile of at least one block of 128 columns, and so have as many rows as the
        largest tile has."""
        pairs, blocks = sizes.pairs, 2 * sizes.inter // BLOCK
        tiles = max(1, max(sizes.routed.hit, sizes.routed.pairs // ROWS[-1]) * blocks)
        most_splits = max(1, min(MOST_PROGRAMS // tiles, sizes.hidden // BLOCK // MIN_STEPS))
        parts = 4 * 2 * sizes.inter * most_splits  # in fp32
        of_pair = parts + sizes.inter + sizes.inter // BLOCK * 4 + sizes.hidden * 2
        slots = max(tiles_for(rows, sizes) * (rows + 1) for rows in ROWS)
        return pairs * of_pair + 4 * (slots + (MOST_SEGMENTS + 1) * sizes.local_experts)

    def prepare_with(
        self, config: GroupedConfig, target: Target, operands: FusedMoeOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        import torch
        import triton
        import triton.language as tl

        from kernels.fused_moe.triton import grouped_jit

        prepared = ConfiguredPrepared(operands, out)
        o, sizes = operands, operands.sizes
        hidden, inter, pairs = sizes.hidden, sizes.inter, sizes.pairs
        splits, steps = splits_for(config, target.units, sizes), inter // BLOCK
        narrow = torch.float32 if prepared.interpreted else torch.bfloat16

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=out.device)

        parts = 0 if config.fuse else splits
        gate_up = empty(parts, pairs, 2 * inter, dtype=torch.float32 if parts > 1 else narrow)
        h_q, h_scale = empty(pairs, inter, dtype=o.w13.dtype), empty(pairs, steps)
        h_written = prepared.rounded_later(h_q)
        given = empty(0 if config.by_token else pairs, hidden, dtype=narrow)
        x_q = prepared.readable(o.x_q)
        h_read = prepared.readable(h_q)
        w13 = prepared.readable(o.w13)
        w2 = prepared.readable(o.w2)

        product = {"e4m3fn": tl.float8e4nv, "e4m3fnuz": tl.float8e4b8}[sizes.fp8]
        shared: dict[str, Any] = {
            "HIDDEN": hidden,
            "INTER": inter,
            "BLOCK": BLOCK,
            "BLOCK_M": config.rows,
            "SWAP": config.swap,
            "PRODUCT": tl.float32 if prepared.interpreted else product,
            "FNUZ_BITS": w2.dtype == torch.uint8,
        }
        tiled = {"SORTED": config.sort, "CHIPLETS": config.chiplets}
        at: tuple[torch.Tensor | None, ...] = (o.topk_ids, None, None, None)
        tiles, group, aligned = pairs, 1, []
        if config.sort:
            aligned = [Alignment(sizes, config.rows, o.topk_ids)]
            at = (o.topk_ids, *aligned[0].tensors)
            tiles = tiles_for(config.rows, sizes)
            # The average tiles of an expert, which read the same weights and are therefore neighbours.
            group = max(1, min(MOST_GROUP, round(tiles_of(config, sizes) / max(1, sizes.routed.hit))))
        h = (h_written, h_scale)
        up = functools.partial(
            grouped_jit.up_kernel[(tiles * up_columns(config, sizes), splits)],
            *(x_q, o.x_scale, w13, o.w13_scale, *at, gate_up, *h),
            *(pairs, group, triton.cdiv(hidden // BLOCK, splits)),
            **(shared | tiled | rounding(sizes)),
            **options(config.warps, config.stages, config.instruction),
            PICKS=sizes.picks,
            BLOCK_N=BLOCK if config.fuse else config.columns,
            FUSE=config.fuse,
        )
        pairs_of_program = 8 if pairs * steps > MANY else 1
        silu = functools.partial(
            grouped_jit.silu_kernel[(triton.cdiv(pairs, pairs_of_program), steps)],
            *(gate_up, o.topk_ids, *h, pairs),
            **rounding(sizes),
            INTER=inter,
            SPLITS=splits,
            BLOCK_M=pairs_of_program,
            num_warps=4 if pairs_of_program > 1 else 1,
        )
        # The configuration's columns, or the largest smaller power of two that divides hidden.
        columns = next(n for n in (1024, 512, 256, 128, 64) if n <= config.down and hidden % n == 0)
        products = (h_read, h_scale, w2, o.w2_scale)
        if config.by_token:
            # On NVIDIA the load that finds the expert takes half of the stages.
            stages = config.stages if config.instruction else 2 * config.stages
            down = functools.partial(
                grouped_jit.down_by_token_kernel[(hidden // columns, sizes.tokens)],
                *(*products, o.topk_ids, o.topk_weights, prepared.written),
                **(shared | options(config.warps, stages, config.instruction)),
                PICKS=sizes.picks,
                BLOCK_N=columns,
            )
        else:
            stages = min(config.stages, steps + 1)
            down = functools.partial(
                grouped_jit.down_kernel[(tiles * (hidden // columns),)],
                *(*products, *at, given, pairs, group),
                **(shared | tiled | options(config.warps, stages, config.instruction)),
                BLOCK_N=columns,
            )
        combined = COMBINED if sizes.tokens >= 32 else FEW_COMBINED
        prepared.launches = [
            *aligned,
            up,
            *([] if config.fuse else [silu]),
            *([functools.partial(h_q.copy_, h_written)] if prepared.interpreted else []),
            down,
            *([] if config.by_token else [combination(o, given, None, prepared.written, combined)]),
        ]
        return prepared


def _tiles(target: Target, sizes: FusedMoeSizes) -> Iterator[GroupedConfig]:
    """Configurations that differ in more than Triton's options, with tiles between a quarter of and twice the
    average rows of an expert. Those that come to the same number of splits are given once."""
    mean, tiles = rows_of_expert(sizes), []
    if mean <= ALONE[0] and sizes.routed.busiest <= ALONE[1]:
        for columns, down, by_token in itertools.product((64, 128), (64, 128), (True, False)):
            tiles.append(GroupedConfig(16, False, False, columns, 1, down, by_token))
    for rows, down in itertools.product(ROWS, (64, 128)):
        if min(64, mean / 4) <= rows < 2 * max(16, mean):
            tiles.append(GroupedConfig(rows, down=down))
            tiles += [GroupedConfig(rows, fuse=False, columns=each, down=down) for each in (64, 128)]
    for tile in tiles:
        by_splits: dict[int, GroupedConfig] = {}
        for per_unit in (1, 2) if tile.sort else (1, 2, 4):
            config = replace(tile, per_unit=per_unit)
            by_splits.setdefault(splits_for(config, target.units, sizes), config)
        yield from by_splits.values()


def rows_of_expert(sizes: FusedMoeSizes) -> float:
    """The average rows of the experts that are hit."""
    return sizes.routed.pairs / max(1, sizes.routed.hit)


def tiles_of(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """The tiles that have work to do, with the picks of the routing."""
    return _sorted_tiles(sizes.routed, config.rows) if config.sort else sizes.routed.pairs


@functools.lru_cache(maxsize=256)
def _sorted_tiles(routed: Routing, rows: int) -> int:
    return sum(math.ceil(load / rows) for load in routed.loads())


def up_columns(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """Blocks of columns of the up product."""
    return sizes.inter // BLOCK if config.fuse else 2 * sizes.inter // config.columns


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
