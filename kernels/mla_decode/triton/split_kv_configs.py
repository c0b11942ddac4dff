"""Configurations of split-KV MLA decode: what a program may take at once, and what is taken by rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernels.mla_decode.sizes import KV_BYTES, WIDTH, MlaDecodeSizes
from kernels.tuning import Target

PER_UNIT = (1, 2, 4, 8)
MOST_PER_UNIT = max(PER_UNIT)
LEAST_HEADS, MOST_HEADS = 16, 64  # of a block

WGMMA_ROWS = 64  # of sm_90's fast instruction; of sm_100's, 64 or 128
MMA_COLUMNS, MFMA_COLUMNS = 8, 16  # tokens of an instruction of 16 heads


@dataclass(frozen=True)
class SplitKvConfig:
    """What one program of the split kernel takes, and how many there are.

    heads:    query heads
    tokens:   cached rows per step of its loop
    swap:     whether it computes transposed tiles: tokens and latents are the rows of sm_90's instructions
    reload:   whether it loads the tokens again for the second product, which wants them in another order:
              gfx942 else reads one of the two operands from shared memory in 16 bits at a time
    per_unit: programs that parts of sequences are to give each compute unit
    warps, stages: Triton's; instruction: rows of AMD's matrix instruction, 0 elsewhere
    """

    heads: int
    tokens: int
    swap: bool = False
    reload: bool = False
    per_unit: int = 1
    warps: int = 4
    stages: int = 2
    instruction: int = 0

    def blocks(self, heads: int) -> int:
        return math.ceil(heads / self.heads)

    def apart(self, target: Target) -> bool:
        """Whether the scores are computed in a branch: see split_kv_jit."""
        return target.kind == "cuda" and not self.swap and self.heads >= WGMMA_ROWS and self.warps > 4

    def score_padding(self, target: Target) -> float:
        """By how much the products of scores take more than their flops: warps that repeat those of others,
        and fast instructions of so few columns that they wait for their rows, which shared memory delivers in
        the time of 32 columns, and each column in that of half a column."""
        if target.kind == "rocm":
            return self.warps * 16 / max(16, self.heads) if self.heads < 16 * self.warps else 1.0
        if self.swap or self.heads >= WGMMA_ROWS:
            columns = self.heads if self.swap else self.tokens * 4 // self.warps
            return max(1.0, 0.5 + 32 / columns)
        return max(1.0, self.warps * MMA_COLUMNS / self.tokens)


# Heads, tokens, warps and numbers of stages; what of them fits is the compiler's to say.
_CUDA = (
    (16, 16, (4,), (2, 3, 4, 5)),
    (16, 32, (4, 8), (2, 3, 4)),
    (16, 64, (4, 8), (2, 3)),
    (32, 16, (8,), (3, 4)),
    (32, 32, (8,), (2, 3, 4)),
    (32, 64, (8,), (2, 3)),
    (64, 32, (8,), (2, 3, 4)),
    (64, 64, (8,), (2, 3)),
)
_ROCM = (
    (16, 16, (2, 4), (1, 2)),
    (16, 32, (2, 4), (1, 2)),
    (16, 64, (4,), (1, 2)),
    (32, 16, (4,), (1, 2)),
    (32, 32, (4,), (1, 2)),
    (64, 16, (4,), (1, 2)),
    (64, 32, (4,), (1, 2)),
)
_CPU = ((16, 32, (4,), (2,)), (16, 128, (4,), (2,)), (64, 128, (4,), (2,)))
_TILES = {"cuda": _CUDA, "rocm": _ROCM, "cpu": _CPU}


def tiles(target: Target, sizes: MlaDecodeSizes) -> Iterator[SplitKvConfig]:
    """All blocks of heads that neither are padded to twice the heads nor so small that more than four of them
    read the same tokens; of very many heads, the larger ones."""
    heads = sizes.heads
    blocks = [block for block in (16, 32, 64) if heads <= 4 * block and block < 2 * max(16, heads)] or [
        32,
        64,
    ]
    instruction = 16 if target.kind == "rocm" else 0
    for block, tokens, warps, stages in _TILES[target.kind]:
        if block in (blocks or (32, 64)):
            for w, s, per_unit in itertools.product(warps, stages, PER_UNIT):
                # AMD's pipelines hold a stage in registers.
                if target.kind == "rocm" and tokens * WIDTH * KV_BYTES[sizes.kv] * (s - 1) > target.shared:
                    continue
                config = SplitKvConfig(
                    block, tokens, per_unit=per_unit, warps=w, stages=s, instruction=instruction
                )
                yield config
                if target.arch == "gfx942" and tokens == 16:
                    yield replace(config, reload=True)
                if target.arch == "sm_90" and (block, tokens, w, s) == (16, 64, 4, 2):
                    yield replace(config, swap=True)


@dataclass(frozen=True)
class SplitRule:
    """For blocks of few heads and of many; and where the cache is FP8."""

    few: SplitKvConfig
    many: SplitKvConfig
    few_fp8: SplitKvConfig
    many_fp8: SplitKvConfig


_FEW = SplitKvConfig(16, 32, per_unit=2, warps=4, stages=3)
_MI300 = (
    SplitKvConfig(16, 16, per_unit=2, warps=4, stages=2, instruction=16),
    SplitKvConfig(64, 16, reload=True, warps=4, stages=2, instruction=16),
)
_MI350 = (
    SplitKvConfig(16, 32, per_unit=2, warps=4, stages=2, instruction=16),
    SplitKvConfig(64, 32, warps=4, stages=2, instruction=16),
)
_INTERPRETED = (SplitKvConfig(16, 128, per_unit=2), SplitKvConfig(64, 128, per_unit=2))

# 16 heads: as many programs on a unit as keep enough bytes on their way for memory, which bounds them.
# 64, which products bound: the fastest instructions, and enough tokens a step that those do not wait for
# shared memory. No spill on Triton 3.6 and 3.7, on gfx942 in 64 KB of it. By compiling, not by timing.
HEURISTIC = {
    "cuda": SplitRule(
        few=_FEW,
        many=SplitKvConfig(64, 64, warps=8, stages=2),
        few_fp8=_FEW,
        many_fp8=SplitKvConfig(64, 64, warps=8, stages=3),
    ),
    "sm_100": SplitRule(
        few=_FEW,
        many=SplitKvConfig(64, 32, warps=8, stages=3),
        few_fp8=SplitKvConfig(16, 16, per_unit=2, warps=4, stages=5),
        many_fp8=SplitKvConfig(32, 32, warps=8, stages=4),
    ),
    "rocm": SplitRule(*_MI300, *_MI300),
    # 64 heads and 32 tokens of an FP8 cache spill on Triton 3.6.
    "gfx950": SplitRule(*_MI350, _MI350[0], replace(_MI350[1], tokens=16)),
    "cpu": SplitRule(*_INTERPRETED, *_INTERPRETED),
}
FEW = 32  # heads


def heuristic(target: Target, sizes: MlaDecodeSizes) -> SplitKvConfig:
    rule, few = target.pick(HEURISTIC), sizes.heads <= FEW
    if sizes.kv == "fp8":
        return rule.few_fp8 if few else rule.many_fp8
    return rule.few if few else rule.many
