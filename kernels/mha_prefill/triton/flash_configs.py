"""Configurations of the flash kernel: which there are for given sizes, and what each asks of a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from kernels.mha_prefill.sizes import BYTES, VALUE, WIDTH, MhaPrefillSizes
from kernels.triton_runtime import options
from kernels.tuning import Demand, Target

PAD = 128  # keys to whose multiple a sequence's turned values are filled up; at least a step's


@dataclass(frozen=True)
class FlashConfig:
    """What one program takes.

    rows:          query rows
    keys:          keys per step of its loop; divides PAD
    warps, stages: Triton's; instruction: rows of AMD's matrix instruction, 0 elsewhere
    waves:         of a SIMD, for which AMD's compiler must leave registers; 0 lets it say
    turned:        whether a kernel before lays FP8 values so that keys lie side by side
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    instruction: int = 0
    waves: int = 0
    turned: bool = False

    def options(self) -> dict[str, int]:
        """Triton's."""
        common = options(self.warps, self.stages, self.instruction)
        return common | {"waves_per_eu": self.waves} if self.waves else common


def lanes(config: FlashConfig, target: Target) -> tuple[int, int]:
    """How matrix instructions leave a row of scores: threads that take turns, and columns at each turn."""
    if config.instruction:
        return 64 // config.instruction, 4
    return 4, 2


def turnable(target: Target, sizes: MhaPrefillSizes) -> bool:
    """Whether FP8 values may be wanted with keys side by side: wgmma takes no other, and gfx942 loads no
    other without shuffling bytes. sm_100 takes both, gfx950 has a load that transposes."""
    return sizes.dtype == "fp8" and target.arch in ("sm_90", "gfx942")


def configurations(target: Target, sizes: MhaPrefillSizes) -> Iterator[FlashConfig]:
    """Tiles of at most twice the rows of the longest sequence, of at least an instruction's rows a warp. Two
    programs of four warps on a compute unit fill each other's waits, one of eight halves what is read; steps
    of many keys wait less often."""
    longest = max(new for _, new in sizes.lengths())
    fp8 = sizes.dtype == "fp8"
    turned = (False, True) if turnable(target, sizes) else (False,)
    if target.kind == "rocm":
        # Eight warps are two waves of each SIMD without being told.
        tiles = [(64, 4, 0), (64, 4, 2), (128, 4, 0), (128, 4, 2), (128, 8, 0), (256, 8, 0)]
        keys: tuple[int, ...] = (32, 64, 128) if fp8 else (32, 64)
        instructions: tuple[int, ...] = (16, 32)
        stages: tuple[int, ...] = (1, 2) if target.arch == "gfx942" else (1, 2, 3)
    else:
        tiles = [(64, 4, 0), (128, 4, 0), (128, 8, 0)]
        keys, stages, instructions = (32, 64, 128), (2, 3, 4), (0,)
    for tile, step, deep, instruction, turn in product(tiles, keys, stages, instructions, turned):
        rows, warps, waves = tile
        # Scores and sums alone would fill a thread's registers.
        full = target.kind == "cuda" and rows * (step + VALUE) >= 256 * 32 * warps
        if rows < 2 * max(64, longest) and rows >= instruction * warps and not full:
            yield FlashConfig(rows, step, warps, deep, instruction, waves, turn)


# From compiling with Triton 3.6 and 3.7, not yet from measuring: no spill, every product by the fastest
# instruction, none serialised; on AMD two programs on a unit, for which 3.6 must be told.
HEURISTIC = {
    "cuda bf16": FlashConfig(128, 128, warps=8, stages=2),
    "cuda fp8": FlashConfig(128, 128, warps=8, stages=2),
    "sm_90 fp8": FlashConfig(128, 64, warps=4, stages=3, turned=True),
    "rocm bf16": FlashConfig(128, 32, warps=4, stages=3, instruction=32, waves=2),
    "rocm fp8": FlashConfig(128, 64, warps=4, stages=2, instruction=32, waves=2),
    "gfx942 bf16": FlashConfig(128, 32, warps=4, stages=1, instruction=32, waves=2),
    "gfx942 fp8": FlashConfig(128, 64, warps=4, stages=1, instruction=32, waves=2, turned=True),
    "cpu bf16": FlashConfig(128, 128),
    "cpu fp8": FlashConfig(128, 128),
}


def heuristic(target: Target, sizes: MhaPrefillSizes) -> FlashConfig:
    """By architecture and dtype; half the rows where no sequence has more new tokens."""
    config = HEURISTIC.get(f"{target.arch} {sizes.dtype}") or HEURISTIC[f"{target.kind} {sizes.dtype}"]
    if target.kind != "cpu" and max(new for _, new in sizes.lengths()) <= 64:
        return replace(config, rows=64, warps=4, instruction=min(16, config.instruction))
    return config


def steps_of(sizes: MhaPrefillSizes, config: FlashConfig) -> list[int]:
    """Of the loop of each tile of a head, with those on the diagonal."""
    return [
        math.ceil(min(prefix + first + config.rows, prefix + new) / config.keys)
        for prefix, new in sizes.lengths()
        for first in range(0, new, config.rows)
    ]


def columns(keys: int, batch: int) -> int:
    """Of turned values: each sequence begins at a multiple of PAD."""
    return (keys // PAD + batch) * PAD


def demands(config: FlashConfig, target: Target, sizes: MhaPrefillSizes) -> list[Demand]:
    """Of the mean program of each kernel; keys are counted as far as its last step reads them. Where values
    could be turned and are not, their bytes are shuffled in registers, on which each step waits."""
    steps = steps_of(sizes, config)
    item = BYTES[sizes.dtype]
    step = config.keys * (WIDTH + VALUE) * item
    values = sizes.keys * VALUE * item
    moved = sizes.queries * (WIDTH * item + VALUE * BYTES["bf16"]) + sizes.keys * WIDTH * item + values
    flash = Demand(
        kernel="flash_kernel",
        programs=sizes.heads * len(steps),
        flops=2.0 * config.rows * config.keys * (WIDTH + VALUE) * sum(steps) / len(steps),
        dtype=sizes.dtype,
        read=config.rows * WIDTH * item + step * sum(steps) / len(steps),
        in_flight=step * max(1, config.stages - 1),
        moved=sizes.heads * moved,
        overlaps=config.stages > 1 and config.turned == turnable(target, sizes),
    )
    if not config.turned:
        return [flash]
    block = float(PAD * VALUE * item)
    blocks = sum(math.ceil((prefix + new) / PAD) for prefix, new in sizes.lengths())
    turn = Demand("turn_kernel", sizes.heads * blocks, 0, "fp32", block, block, 2.0 * sizes.heads * values)
    return [turn, flash]
