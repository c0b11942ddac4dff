"""The suite's own fused MoE in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernels.formats import BLOCK
from kernels.fused_moe.layouts import MOST_SEGMENTS, Alignment, combination, most_tiles, requantising
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes
from kernels.lazy import torch
from kernels.op import Call
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Target
from shapes.routing import Routing

# The interpreter's speed on a busy Zen 4 core. With e4m3fnuz a weight takes half as long again.
WEIGHT_S = 1.3e-7  # seconds for a weight that a program reads
TOKEN_S = 3e-3  # seconds for adding up a token's picks
EXPERT_S = 15e-3  # seconds for placing an expert's pairs

CHIPLETS = 8  # of gfx942 and gfx950
ROWS = (16, 32, 64, 128)  # of a tile
COMBINED = 1024  # columns that a program of `combine_kernel` computes
FEW_COMBINED = 256  # the same below 32 tokens, for which there would otherwise be too few programs
MIN_STEPS = 4  # the least blocks of K of a split (see MIN_STEPS of split_k)
MOST_PROGRAMS = 1216  # programs that splits make on any device: four on each of an MI300X's 304 compute units
MOST_GROUP = 8  # the most tiles that compute a block of columns before the next block
# Each pair may be a tile of its own where experts have so few pairs, on average and at most.
ALONE_MEAN, ALONE_MOST = 1.5, 4
MANY_BLOCKS = 8192  # blocks of h up to which a SiLU program computes one; where there are more, eight


@dataclass(frozen=True)
class GroupedConfig:
    """What programs compute, and which launches there are."""

    rows: int  # pairs of one expert in a tile
    sort: bool = True  # brings pairs into the order of experts; else each is a tile, which saves a launch
    fuse: bool = True
    """Whether the up product also computes h: a program then computes gate and up for the 128 columns of one
    scale and for all of K. Else SiLU is a launch of its own."""

    columns: int = 128  # of gate and up that a program computes, where not fused; they divide 128
    per_unit: int = 1  # programs per compute unit that splits of K in the up product are to make
    down: int = 128  # columns of the down product that a program computes
    by_token: bool = False  # where not sorted, the down product adds up a token's picks; else a launch does
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
            rows = next((rows for rows in (16, 64) if mean <= rows), 128)
            yield GroupedConfig(rows, down=1024)
            return
        for config in _tiles(target, sizes):
            is_small = config.rows < 64
            for warps in (4, 8) if config.sort else (4,):
                if target.kind != "rocm":
                    for stages in (3, 4, 5) if is_small else (3, 4):
                        yield replace(config, warps=warps, stages=stages, swap=is_small)
                    continue
                # The up product needs more shared memory than the down product. One stage is in registers.
                weight_rows = 2 * BLOCK if config.fuse else config.columns
                stage_bytes = (config.rows + weight_rows) * BLOCK
                for stages, instruction in itertools.product((2, 3) if is_small else (1, 2), (16, 32)):
                    fits = stage_bytes * (stages - 1) <= target.shared
                    if fits and (config.rows >= 2 * instruction or instruction == 16):
                        on_amd = replace(config, chiplets=CHIPLETS, instruction=instruction)
                        yield replace(on_amd, warps=warps, stages=stages)

    def features(self, sizes: FusedMoeSizes) -> dict[str, float | str]:
        """The average rows of an expert, how many experts are hit, and how large they are."""
        of_expert = {name: getattr(sizes, name) for name in ("hidden", "inter", "fp8", "scales")}
        return {"rows": rows_of_expert(sizes), "hit": sizes.routed.hit, **of_expert}

    def interpreted_s(self, sizes: FusedMoeSizes) -> float:
        tiles = used_tiles(next(self.configurations(CPU, sizes)), sizes)
        weights = tiles * sizes.expert_values * (1.5 if sizes.fp8 == "e4m3fnuz" else 1.0)
        return weights * WEIGHT_S + sizes.tokens * TOKEN_S + sizes.local_experts * EXPERT_S

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """An upper bound over all platforms and configurations. Splits make at most MOST_PROGRAMS programs.
        Without splits each block of 128 columns has a program for each tile. There are at least as many tiles
        as experts that are hit, and as full tiles of the largest size would hold all pairs."""
        blocks = 2 * sizes.inter // BLOCK
        least_programs = max(1, max(sizes.routed.hit, sizes.routed.pairs // ROWS[-1]) * blocks)
        most_splits = max(1, min(MOST_PROGRAMS // least_programs, sizes.hidden // BLOCK // MIN_STEPS))
        gate_up = 4 * 2 * sizes.inter * most_splits  # in fp32
        h = sizes.inter + sizes.inter // BLOCK * 4  # in FP8, with fp32 scales
        slots = max(most_tiles(rows, sizes) * (rows + 1) for rows in ROWS)  # and the expert of each tile
        alignment = 4 * (slots + (MOST_SEGMENTS + 1) * sizes.local_experts)
        return sizes.pairs * (gate_up + h + 2 * sizes.hidden) + alignment

    def prepare_with(
        self, config: GroupedConfig, target: Target, operands: FusedMoeOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        import triton
        import triton.language as tl

        from kernels.fused_moe.triton import grouped_jit

        prepared = ConfiguredPrepared(operands, out)
        sizes, topk_ids = operands.sizes, operands.topk_ids
        hidden, inter, pairs = sizes.hidden, sizes.inter, sizes.pairs
        splits, steps = splits_for(config, target.units, sizes), inter // BLOCK
        # The interpreter truncates to bf16 where it should round.
        bf16 = torch.float32 if prepared.interpreted else torch.bfloat16

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=out.device)

        parts = 0 if config.fuse else splits
        gate_up = empty(parts, pairs, 2 * inter, dtype=torch.float32 if parts > 1 else bf16)
        h_q, h_scale = empty(pairs, inter, dtype=operands.w13.dtype), empty(pairs, steps)
        h_written = prepared.written_for(h_q)
        expert_out = empty(0 if config.by_token else pairs, hidden, dtype=bf16)
        x_q, h_read = prepared.readable(operands.x_q), prepared.readable(h_q)
        w13, w2 = prepared.readable(operands.w13), prepared.readable(operands.w2)

        fp8 = {"e4m3fn": tl.float8e4nv, "e4m3fnuz": tl.float8e4b8}[sizes.fp8]
        # Constants of all products, and of those that compute tiles.
        of_products: dict[str, Any] = {
            "HIDDEN": hidden, "INTER": inter, "BLOCK": BLOCK, "BLOCK_M": config.rows, "SWAP": config.swap,
            "PRODUCT": tl.float32 if prepared.interpreted else fp8, "FNUZ_BITS": w2.dtype == torch.uint8,
        }  # fmt: skip
        of_tiles = {**of_products, "SORTED": config.sort, "CHIPLETS": config.chiplets}
        launches: list[Call] = []
        # ids, slots, expert_of and used_tiles, as the kernels have them
        alignment: tuple[torch.Tensor | None, ...] = (topk_ids, None, None, None)
        tiles, group = pairs, 1
        if config.sort:
            align = Alignment(sizes, config.rows, topk_ids)
            launches.append(align)
            alignment = (topk_ids, align.slots, align.expert_of, align.used_tiles)
            tiles = most_tiles(config.rows, sizes)
            # The average tiles of an expert, which read the same weights: so they are a group (see `_place`).
            group = max(1, min(MOST_GROUP, round(used_tiles(config, sizes) / max(1, sizes.routed.hit))))
        up = functools.partial(
            grouped_jit.up_kernel[(tiles * up_blocks(config, sizes), splits)],
            x_q, operands.x_scale, w13, operands.w13_scale, *alignment, gate_up, h_written, h_scale,
            pairs, group, triton.cdiv(hidden // BLOCK, splits),
            **(of_tiles | requantising(sizes)), **options(config.warps, config.stages, config.instruction),
            PICKS=sizes.picks, BLOCK_N=BLOCK if config.fuse else config.columns, FUSE=config.fuse,
        )  # fmt: skip
        launches.append(up)
        if not config.fuse:
            launches.append(_silu(sizes, topk_ids, gate_up, h_written, h_scale))
        if prepared.interpreted:
            launches.append(functools.partial(h_q.copy_, h_written))
        # The configuration's columns, or the largest smaller power of two that divides hidden.
        columns = next(n for n in (1024, 512, 256, 128, 64) if n <= config.down and hidden % n == 0)
        factors = (h_read, h_scale, w2, operands.w2_scale)
        if config.by_token:
            # On NVIDIA, where `instruction` is 0, the load that finds the expert takes half of the stages.
            stages = config.stages if config.instruction else 2 * config.stages
            down = functools.partial(
                grouped_jit.down_by_token_kernel[(hidden // columns, sizes.tokens)],
                *factors, topk_ids, operands.topk_weights, prepared.written,
                **of_products, **options(config.warps, stages, config.instruction),
                PICKS=sizes.picks, BLOCK_N=columns,
            )  # fmt: skip
            launches.append(down)
        else:
            stages = min(config.stages, steps + 1)  # more would have nothing to load
            down = functools.partial(
                grouped_jit.down_kernel[(tiles * (hidden // columns),)],
                *factors, *alignment, expert_out, pairs, group,
                **of_tiles, **options(config.warps, stages, config.instruction), BLOCK_N=columns,
            )  # fmt: skip
            combined = COMBINED if sizes.tokens >= 32 else FEW_COMBINED
            launches += [down, combination(operands, expert_out, None, prepared.written, combined)]
        prepared.launches = launches
        return prepared


def _silu(
    sizes: FusedMoeSizes, ids: torch.Tensor, gate_up: torch.Tensor, h: torch.Tensor, h_scale: torch.Tensor
) -> Call:
    """The launch that computes h and its scales from gate and up."""
    import triton

    from kernels.fused_moe.triton.grouped_jit import silu_kernel

    pairs, steps = h_scale.shape
    rows = 8 if pairs * steps > MANY_BLOCKS else 1
    return functools.partial(
        silu_kernel[(triton.cdiv(pairs, rows), steps)],
        gate_up, ids, h, h_scale, pairs, **requantising(sizes),
        INTER=sizes.inter, SPLITS=len(gate_up), BLOCK_M=rows, num_warps=4 if rows > 1 else 1,
    )  # fmt: skip


def _tiles(target: Target, sizes: FusedMoeSizes) -> Iterator[GroupedConfig]:
    """Configurations that differ in more than Triton's options. Tiles have between a quarter of and twice the
    average rows of an expert. Of several per_unit with the same number of splits the first is yielded."""
    mean, configs = rows_of_expert(sizes), []
    if mean <= ALONE_MEAN and sizes.routed.busiest <= ALONE_MOST:
        alone = GroupedConfig(16, sort=False, fuse=False)
        for columns, down, by_token in itertools.product((64, 128), (64, 128), (True, False)):
            configs.append(replace(alone, columns=columns, down=down, by_token=by_token))
    for rows, down in itertools.product(ROWS, (64, 128)):
        if min(64, mean / 4) <= rows < 2 * max(16, mean):
            fused = GroupedConfig(rows, down=down)
            configs += [fused, *(replace(fused, fuse=False, columns=columns) for columns in (64, 128))]
    for config in configs:
        by_splits: dict[int, GroupedConfig] = {}
        for per_unit in (1, 2) if config.sort else (1, 2, 4):
            of_units = replace(config, per_unit=per_unit)
            by_splits.setdefault(splits_for(of_units, target.units, sizes), of_units)
        yield from by_splits.values()


def rows_of_expert(sizes: FusedMoeSizes) -> float:
    """The average rows of the experts that are hit."""
    return sizes.routed.pairs / max(1, sizes.routed.hit)


def used_tiles(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """The tiles that have an expert, for the picks of the case's routing."""
    return _sorted_tiles(sizes.routed, config.rows) if config.sort else sizes.routed.pairs


@functools.lru_cache(maxsize=256)
def _sorted_tiles(routed: Routing, rows: int) -> int:
    return sum(math.ceil(load / rows) for load in routed.loads())


def up_blocks(config: GroupedConfig, sizes: FusedMoeSizes) -> int:
    """The number of blocks of columns of the up product."""
    return sizes.inter // BLOCK if config.fuse else 2 * sizes.inter // config.columns


def splits_for(config: GroupedConfig, units: int, sizes: FusedMoeSizes) -> int:
    """The number of parts of the up product's K: with enough blocks, each unit gets `per_unit` programs."""
    if config.fuse:
        return 1
    blocks = sizes.hidden // BLOCK
    programs = max(1, used_tiles(config, sizes) * up_blocks(config, sizes))
    most = min(units * config.per_unit, MOST_PROGRAMS)
    splits = max(1, min(most // programs, blocks // MIN_STEPS))
    blocks_of_split = math.ceil(blocks / splits)
    return math.ceil(blocks / blocks_of_split)  # so that the last split has a block
