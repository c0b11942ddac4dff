"""The suite's own block-scale GEMM in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernels.block_scale_gemm.layouts import column_major
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.lazy import torch
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options, require_format
from kernels.tuning import Target

# The interpreter's speed on one core of a Zen 4 server.
STEP_S = 4e-4  # seconds for a step of the loop over K, without what follows
CODE_S = 8e-8  # seconds for converting an FP8 value to fp32
FLOPS = 3e10  # numpy's fp32 operations per second

DIES = {"gfx942": 8, "gfx950": 8}
"""The dies of an MI300X and an MI355X. Each has an L2 cache of its own; programs go to the dies in turn."""

MIN_STEPS = 2
"""The least blocks of K of a split: fewer gain less than it costs to write a part and to fill a pipeline."""

SUM_VALUES = 512  # values of the output that a program of `sum_kernel` computes

MOST_PARTS = 304 * 4 * 256 * 128
"""The most values of all parts: four of the largest tiles on each of an MI300X's 304 compute units."""

# Tiles for NVIDIA: (rows, columns, warps, halves). An SM's registers hold one program of 128 x 128 with 8
# warps, or two with 4 warps and halves. Of two programs one can scale its sums while the other multiplies.
CUDA_TILES = (
    (16, 64, 4, False), (16, 128, 4, False), (32, 64, 4, False), (32, 128, 4, False), (64, 64, 4, False),
    (64, 128, 4, False), (128, 64, 4, False), (128, 128, 8, False), (128, 128, 4, True), (256, 128, 8, True),
)  # fmt: skip
LAST_SUMS_VALUES = 64 * 128  # the most values of a tile whose parts its last program can add up fast enough

# Tiles for AMD: (rows, columns, warps). Tiles of few rows have programs of one wave, of which many run on a
# compute unit, as in AITER's tuned tables (aiter/ops/triton/configs/gemm/*-GEMM-A8W8_BLOCKSCALE-*.json).
ROCM_TILES = (
    (16, 32, 1), (16, 64, 1), (16, 64, 2), (16, 128, 4), (32, 32, 1), (32, 64, 2), (32, 128, 4), (64, 64, 1),
    (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 128, 8),
)  # fmt: skip
WAVES = (4, 8, 16)  # waves that splits of K are to give a compute unit: one to four on each of its SIMDs


@dataclass(frozen=True)
class SplitKConfig:
    """What one program computes, and how many programs there are."""

    rows: int  # of the output
    columns: int  # of the output; they divide 128, so that a program has one scale of b in a step
    swap: bool = False  # computes the transposed tile: FP8 instructions of NVIDIA take at least 64 rows
    halves: bool = False  # multiplies half of its rows at a time, which takes fewer registers
    tma: bool = False  # loads by descriptors (NVIDIA's tensor memory accelerator)
    persistent: bool = False  # programs loop over tiles: the next tile loads while one is stored
    per_unit: int = 1  # programs per compute unit: the most that loop over tiles, or that splits of K make
    sums: str = "later"  # parts of a tile are added up by its "last" program, or "later" by another kernel
    warps: int = 4
    stages: int = 2

    def tiles(self, sizes: BlockScaleGemmSizes) -> int:
        return math.ceil(sizes.m / self.rows) * math.ceil(sizes.n / self.columns)

    def splits(self, target: Target, sizes: BlockScaleGemmSizes) -> int:
        """The number of parts of K: if it has enough blocks, each compute unit gets `per_unit` programs."""
        if self.persistent:
            return 1
        blocks = sizes.k_blocks
        splits = target.units * self.per_unit // self.tiles(sizes)
        splits = max(1, min(splits, blocks // MIN_STEPS))
        blocks_of_split = math.ceil(blocks / splits)
        return math.ceil(blocks / blocks_of_split)  # so that the last split has a block

    def programs(self, target: Target, sizes: BlockScaleGemmSizes) -> int:
        """The size of the grid."""
        if self.persistent:
            return min(target.units * self.per_unit, self.tiles(sizes))
        return self.tiles(sizes) * self.splits(target, sizes)


class SplitK(SuiteTriton):
    """The suite's GEMM. Few tokens make few tiles. Then K is split between programs, and the last program of
    a tile or a second kernel adds up their parts."""

    name = "triton.split_k"
    Config = SplitKConfig

    def configurations(self, target: Target, sizes: BlockScaleGemmSizes) -> Iterator[SplitKConfig]:
        """Tiles have fewer than twice the rows of the case, and at least half of its rows, or 64."""
        if target.kind == "cpu":
            yield SplitKConfig(64 if sizes.m <= 64 else 1024, 128)
            return
        is_rocm = target.kind == "rocm"
        m = max(16, sizes.m)  # no tile has fewer rows
        seen = set()
        for config in _rocm() if is_rocm else _cuda(sizes):
            # AMD's pipelines hold one stage in registers.
            shared_stages = max(1, config.stages - 1) if is_rocm else config.stages
            if (config.rows + config.columns) * BLOCK * shared_stages > target.shared:
                continue
            if not min(64, m / 2) <= config.rows < 2 * m:
                continue
            splits = config.splits(target, sizes)
            if splits > 1 and splits * sizes.m * sizes.n > MOST_PARTS:
                continue
            if splits == 1 and not config.persistent:  # then these two have no effect
                config = replace(config, per_unit=1, sums="later")
            # Values of per_unit that lead to the same number of programs are the same configuration.
            key = (replace(config, per_unit=0), config.programs(target, sizes))
            if key not in seen:
                seen.add(key)
                yield config

    def interpreted_s(self, sizes: BlockScaleGemmSizes) -> float:
        return interpreted_s(sizes, next(self.configurations(CPU, sizes)).rows)

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        """An upper bound over all platforms and configurations: the scales of a in this kernel's layout, the
        parts, and the counters of the smallest tiles."""
        parts = min(sizes.m * sizes.n * sizes.k_blocks // MIN_STEPS, MOST_PARTS)
        counters = math.ceil(sizes.m / 16) * math.ceil(sizes.n / 32)
        return 4 * (sizes.m * sizes.k_blocks + parts + counters)

    def prepare_with(
        self, config: SplitKConfig, target: Target, operands: BlockScaleGemmOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        import triton
        import triton.language as tl
        from triton.tools.tensor_descriptor import TensorDescriptor

        from kernels.block_scale_gemm.triton.split_k_jit import gemm_kernel, sum_kernel

        sizes = operands.sizes
        m, n, k = sizes.m, sizes.n, sizes.k
        require_format(sizes.fp8, target)
        a_scale = column_major(operands.a_scale)
        inputs = {"a_q": operands.a_q, "a_scale": a_scale}
        prepared = ConfiguredPrepared(operands, out, inputs=inputs)
        splits = config.splits(target, sizes)
        sums = config.sums if splits > 1 else "whole"  # no parts, so nothing adds them up
        parts = out.new_empty(splits if splits > 1 else 0, m, n, dtype=torch.float32)
        arrived = out.new_zeros(config.tiles(sizes) if sums == "last" else 0, dtype=torch.int32)

        a, b = prepared.readable(operands.a_q), prepared.readable(operands.b_q)
        is_fnuz = operands.b_q.dtype == torch.float8_e4m3fnuz
        if config.tma:
            rows = config.rows // 2 if config.halves else config.rows
            a = TensorDescriptor.from_tensor(a, [rows, BLOCK])
            b = TensorDescriptor.from_tensor(b, [config.columns, BLOCK])
        fp8 = tl.float8e4b8 if is_fnuz else tl.float8e4nv
        product = functools.partial(
            gemm_kernel[(config.programs(target, sizes),)],
            a, a_scale, b, operands.b_scale, prepared.written, parts, arrived,
            m, n, k, splits, triton.cdiv(sizes.k_blocks, splits),
            BLOCK_M=config.rows, BLOCK_N=config.columns, DIES=DIES.get(target.arch, 1), SUMS=sums,
            HALVES=config.halves, PERSISTENT=config.persistent, TMA=config.tma,
            EVEN_K=config.tma or k % BLOCK == 0, SWAP=config.swap,
            PRODUCT=tl.float32 if prepared.interpreted else fp8,
            FNUZ_BITS=prepared.interpreted and is_fnuz, **_options(config, target),
        )  # fmt: skip
        prepared.launches = [product]
        if sums == "later":
            grid = (triton.cdiv(m * n, SUM_VALUES),)
            arguments = (parts, prepared.written, m * n, splits)
            prepared.launches.append(functools.partial(sum_kernel[grid], *arguments, VALUES=SUM_VALUES))
        return prepared


def interpreted_s(sizes: BlockScaleGemmSizes, rows: int) -> float:
    """Seconds that Triton's interpreter takes for a call with tiles of so many rows and 128 columns."""
    steps = math.ceil(sizes.m / rows) * sizes.n_blocks * sizes.k_blocks
    codes, operations = (rows + BLOCK) * BLOCK, 2 * rows * BLOCK * BLOCK
    return steps * (STEP_S + codes * CODE_S + operations / FLOPS)


def _cuda(sizes: BlockScaleGemmSizes) -> Iterator[SplitKConfig]:
    """The configurations for NVIDIA. Descriptors need rows of a multiple of 16 bytes. Large tiles use them
    where they can, and tiles with halves need them, because they leave no registers for addresses."""
    is_aligned = sizes.k % 16 == 0
    for rows, columns, warps, halves in CUDA_TILES:
        if halves and not is_aligned:
            continue
        is_large = rows * columns >= 64 * 128
        all_tma = (False,) if not is_aligned else (True,) if is_large else (True, False)
        all_stages, all_per_unit = ((2, 3, 4), (1, 2)) if is_large else ((3, 4, 6), (1, 2, 4))
        all_sums = ("later", "last") if rows * columns <= LAST_SUMS_VALUES else ("later",)
        for stages, tma in itertools.product(all_stages, all_tma):
            tile = SplitKConfig(
                rows, columns, swap=rows < 64, halves=halves, tma=tma, warps=warps, stages=stages
            )
            for per_unit, sums in itertools.product(all_per_unit, all_sums):
                yield replace(tile, per_unit=per_unit, sums=sums)
            if is_large and tma and not halves:
                yield replace(tile, persistent=True, per_unit=1 if warps == 8 else 2)


def _rocm() -> Iterator[SplitKConfig]:
    """The configurations for AMD. The last program of a tile adds up parts only where programs have one wave.
    In a program of several waves, the barrier that Triton makes lets each wave wait only for its own stores
    (Triton 3.7's assembly for gfx942): the program could be counted before all its stores have ended."""
    for rows, columns, warps in ROCM_TILES:
        for stages, waves in itertools.product((1, 2, 3), WAVES):
            for sums in ("later", "last") if warps == 1 else ("later",):
                per_unit = max(1, waves // warps)
                yield SplitKConfig(rows, columns, per_unit=per_unit, sums=sums, warps=warps, stages=stages)


def _options(config: SplitKConfig, target: Target) -> dict[str, int]:
    """Triton's options. AMD's matrix instructions are those of 16 rows, as in all of AITER's tuned tables for
    this op: they are as fast as those of 32, and no tile is too small for them. On gfx942 one read of shared
    memory serves two of them (kpack). Programs of large tiles are limited to so many registers that two waves
    fit on a SIMD (waves_per_eu)."""
    if target.kind != "rocm":
        return options(config.warps, config.stages)
    launch_options = options(config.warps, config.stages, instruction=16)
    if target.arch == "gfx942":
        launch_options["kpack"] = 2
    if config.warps >= 4 and config.rows * config.columns >= 64 * 64 * config.warps:
        launch_options["waves_per_eu"] = 2
    return launch_options
