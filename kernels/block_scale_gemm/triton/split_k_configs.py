"""Configurations of the block-scale GEMM: which there are, what each asks of a device, and the rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.tuning import Demand, Target


@dataclass(frozen=True)
class SplitKConfig:
    """What one program computes, and how many there are.

    rows, columns: of the output; columns divide 128, so that a program has one scale of b per step
    swap:          whether it computes the tile transposed: on NVIDIA, FP8 instructions take 64 rows at least
    halves:        whether it multiplies half of its rows at a time, the other half's registers being free
    tma:           whether it loads by descriptors (NVIDIA's tensor memory accelerator)
    persistent:    whether programs loop over tiles, the next one's loads under way while one is stored
    per_unit:      programs for each compute unit: that splits of K are to make, or that loop over tiles
    sums:          of splits: by the "last" program of a tile, or "later" by another kernel
    warps, stages: Triton's
    """

    rows: int
    columns: int
    swap: bool = False
    halves: bool = False
    tma: bool = False
    persistent: bool = False
    per_unit: int = 1
    sums: str = "later"
    warps: int = 4
    stages: int = 2

    def tiles(self, sizes: BlockScaleGemmSizes) -> int:
        return math.ceil(sizes.m / self.rows) * math.ceil(sizes.n / self.columns)

    def splits(self, target: Target, sizes: BlockScaleGemmSizes) -> int:
        """As many as give each compute unit its programs, if K has enough blocks; none without a block."""
        if self.persistent:
            return 1
        blocks = sizes.k_blocks
        wanted = target.units * self.per_unit // self.tiles(sizes)
        splits = max(1, min(wanted, blocks // MIN_STEPS))
        return math.ceil(blocks / math.ceil(blocks / splits))

    def programs(self, target: Target, sizes: BlockScaleGemmSizes) -> int:
        if self.persistent:
            return min(target.units * self.per_unit, self.tiles(sizes))
        return self.tiles(sizes) * self.splits(target, sizes)


MIN_STEPS = 2  # blocks of K below which a split costs more than it brings: its part, and a pipeline to fill
SUM_VALUES = 512  # of the output, by a program of the sum
MOST_PARTS = 1216 * 4 * 128 * 64
"""Values in the parts of all splits: of 304 compute units (MI300X) four programs on each, or more of as much
smaller tiles. `configurations` has none with more."""

# (rows, columns, warps, halves). NVIDIA: with 8 warps one program of 128 x 128 is all that an SM's registers
# hold; with 4, and half of the rows at a time, two are, and one multiplies while the other scales.
CUDA = (
    (16, 64, 4, False), (16, 128, 4, False), (32, 64, 4, False), (32, 128, 4, False), (64, 64, 4, False),
    (64, 128, 4, False), (128, 64, 4, False), (128, 128, 8, False), (128, 128, 4, True), (256, 128, 8, True),
)  # fmt: skip
LAST_SUMS = 64 * 128  # values of the largest tile whose parts, 32 KB each, one program might add up in time

# (rows, columns, warps). AMD: few rows go to programs of one wave, many on a unit, as in AITER's tuned tables
# (aiter/ops/triton/configs/gemm/*-GEMM-A8W8_BLOCKSCALE-*.json).
ROCM = (
    (16, 32, 1), (16, 64, 1), (16, 64, 2), (16, 128, 4), (32, 32, 1), (32, 64, 2), (32, 128, 4), (64, 64, 1),
    (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 128, 8),
)  # fmt: skip
WAVES = (4, 8, 16)  # of a compute unit that splits are to make: one to four on each of its SIMDs


def configurations(target: Target, sizes: BlockScaleGemmSizes) -> Iterator[SplitKConfig]:
    """Tiles of half to twice the rows that there are, or of any above 64."""
    seen = set()
    for config in (_rocm if target.kind == "rocm" else _cuda)(sizes):
        # AMD's pipelines hold a stage in registers.
        shared_stages = max(1, config.stages - 1) if target.kind == "rocm" else config.stages
        if (config.rows + config.columns) * BLOCK * shared_stages > target.shared:
            continue
        if not min(64, max(16, sizes.m) / 2) <= config.rows < 2 * max(16, sizes.m):
            continue
        splits = config.splits(target, sizes)
        if splits > 1 and splits * sizes.m * sizes.n > MOST_PARTS:
            continue
        if splits == 1 and not config.persistent:
            config = replace(config, per_unit=1, sums="later")
        # How many programs were wanted does not matter where as many are made.
        same = (*(value for name, value in vars(config).items() if name != "per_unit"),)
        programs = config.programs(target, sizes)
        if (same, programs) not in seen:
            seen.add((same, programs))
            yield config


def _cuda(sizes: BlockScaleGemmSizes) -> Iterator[SplitKConfig]:
    """Descriptors want rows of whole 16 bytes. Where their tiles are large, programs without one have no
    registers for the addresses."""
    aligned = sizes.k % 16 == 0
    for rows, columns, warps, halves in CUDA:
        large = rows * columns >= 64 * 128
        for stages in (2, 3, 4) if large else (3, 4, 6):
            for tma in (True,) if large and aligned else (True, False) if aligned else (False,):
                if halves and not tma:
                    continue
                tile = SplitKConfig(
                    rows, columns, swap=rows < 64, halves=halves, tma=tma, warps=warps, stages=stages
                )
                for per_unit, sums in itertools.product((1, 2) if large else (1, 2, 4), ("later", "last")):
                    if sums == "later" or rows * columns <= LAST_SUMS:
                        yield replace(tile, per_unit=per_unit, sums=sums)
                if large and tma and not halves:
                    yield replace(tile, persistent=True, per_unit=1 if warps == 8 else 2)


def _rocm(sizes: BlockScaleGemmSizes) -> Iterator[SplitKConfig]:
    """The last program of a tile adds up only where programs are single waves: of several, the barrier that
    Triton makes waits for no stores but its own wave's (Triton 3.7's assembly for gfx942)."""
    for rows, columns, warps in ROCM:
        for stages, waves in itertools.product((1, 2, 3), WAVES):
            for sums in ("later", "last") if warps == 1 else ("later",):
                per_unit = max(1, waves // warps)
                yield SplitKConfig(rows, columns, per_unit=per_unit, sums=sums, warps=warps, stages=stages)


# From large tiles to small, of those that are neither much taller than the rows nor, below 64, less tall: the
# first is taken that leaves no compute unit without a tile, else the last, K being split.
RULE = {
    "cuda": (
        SplitKConfig(128, 128, halves=True, tma=True, stages=3),
        SplitKConfig(64, 128, tma=True, stages=3),
        SplitKConfig(64, 64, tma=True, stages=4, sums="last"),
        SplitKConfig(32, 64, swap=True, tma=True, per_unit=2, stages=6, sums="last"),
        SplitKConfig(16, 64, swap=True, tma=True, per_unit=2, stages=6, sums="last"),
    ),
    "rocm": (
        SplitKConfig(128, 128, per_unit=2, warps=8),
        SplitKConfig(64, 128, per_unit=2),
        SplitKConfig(64, 64, per_unit=2),
        SplitKConfig(32, 64, per_unit=2, warps=2),
        SplitKConfig(16, 64, per_unit=2, warps=2),
    ),
    "cpu": (SplitKConfig(1024, 128), SplitKConfig(64, 128)),
}
# There with two stages a program of 8 warps is alone on a unit, and two of 4 warps fit.
RULE["gfx942"] = (SplitKConfig(128, 128, per_unit=2), *RULE["rocm"][1:])


def heuristic(target: Target, sizes: BlockScaleGemmSizes) -> SplitKConfig:
    rule = target.pick(RULE)
    if target.kind == "cpu":
        return rule[sizes.m <= 64]
    fitting = [config for config in rule if min(64, sizes.m) <= config.rows < 2 * max(16, sizes.m)]
    filling = (config for config in fitting if config.tiles(sizes) >= target.units)
    best = next(filling, fitting[-1])
    if sizes.k % 16:
        best = replace(best, tma=False, halves=False, warps=8 if best.halves else best.warps)
    if best.splits(target, sizes) == 1:
        best = replace(best, sums="later")
    # With as many programs, however many were wanted.
    return next(
        config
        for config in configurations(target, sizes)
        if config.programs(target, sizes) == best.programs(target, sizes)
        and replace(config, per_unit=best.per_unit) == best
    )


def demands(config: SplitKConfig, target: Target, sizes: BlockScaleGemmSizes) -> list[Demand]:
    """A program multiplies its whole tile, rows that do not exist too, but reads those only from a cache."""
    m, n, k = sizes.m, sizes.n, sizes.k
    splits, programs = config.splits(target, sizes), config.programs(target, sizes)
    turns = math.ceil(config.tiles(sizes) * splits / programs)
    steps = math.ceil(sizes.k_blocks / splits)
    step = (config.rows + config.columns) * BLOCK
    read, moved = float(turns * steps * step), float(sizes.quantised_bytes + n * k + 2 * m * n)
    parts = 4.0 * splits * m * n if splits > 1 else 0.0
    if parts and config.sums == "last":
        read += 4.0 * splits * min(m, config.rows) * config.columns
        moved += 2 * parts
    elif parts:
        moved += parts - 2 * m * n
    gemm = Demand(
        kernel="gemm_kernel",
        programs=programs,
        flops=2.0 * config.rows * config.columns * BLOCK * steps * turns,
        dtype="fp8",
        read=read,
        in_flight=float(step * max(1, config.stages - 1)),
        overlaps=config.stages > 1,
        moved=moved,
    )
    if not parts or config.sums == "last":
        return [gemm]
    each = 4.0 * SUM_VALUES * splits
    return [
        gemm,
        Demand("sum_kernel", math.ceil(m * n / SUM_VALUES), 0.0, "fp32", each, each, parts + 2.0 * m * n),
    ]
