"""The suite's own MHA prefill in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from kernels.mha_prefill.problem import (
    BYTES,
    NOPE,
    ROPE,
    VALUE,
    WIDTH,
    MhaPrefillOperands,
    Sequence,
    Sizes,
    sequences_of,
    takes,
)
from kernels.op import Support
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Demand, Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Config:
    """What one program takes.

    rows:          query rows
    keys:          keys per step of its loop
    warps, stages: Triton's; instruction: rows of AMD's matrix instruction, 0 elsewhere
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    instruction: int = 0


# From compiling, not yet from measuring: the largest without a spill on any architecture of the platform.
HEURISTIC = {
    "cuda": Config(128, 64, warps=8, stages=3),
    "rocm": Config(128, 32, warps=4, stages=2, instruction=16),
    "cpu": Config(128, 128),
}
INTERPRETED_STEP_S = 4e-3  # of a step over 128 rows and 128 keys, and of a program around its steps


def tiles_of(sequences: list[Sequence], rows: int) -> list[tuple[int, int]]:
    """(sequence, first row) of every program, those with the most keys first, so that none is left to run
    alone at the end."""
    tiles = [(i, first) for i, s in enumerate(sequences) for first in range(0, s.new, rows)]
    return sorted(tiles, key=lambda at: -(sequences[at[0]].prefix + at[1]))


class FlashVarlen(SuiteTriton):
    """One program per tile of a sequence's query rows; blocks of keys above the diagonal are skipped, only
    those on it are masked. q and k are multiplied in parts of 128 and 64, nothing is padded."""

    name = "triton.flash_varlen"
    Config = Config

    def fits(self, sizes: Sizes) -> Support:
        return takes(sizes, "bf16")

    def configurations(self, target: Target, sizes: Sizes) -> Iterator[Config]:
        for rows, keys, warps in product((64, 128), (32, 64, 128), (4, 8)):
            if target.kind == "rocm":
                for stages, instruction in product((1, 2), (16, 32)):
                    yield Config(rows, keys, warps, stages, instruction)
            else:
                for stages in (2, 3, 4):
                    yield Config(rows, keys, warps, stages)

    def heuristic(self, target: Target, sizes: Sizes) -> Config:
        return target.pick(HEURISTIC)

    def features(self, sizes: Sizes) -> dict[str, float | str]:
        """Of whole batches, and of the mean sequence."""
        return {
            "batch": sizes.batch,
            "queries": sizes.queries,
            "keys": sizes.keys,
            "new": sizes.queries / sizes.batch,
            "prefix": (sizes.keys - sizes.queries) / sizes.batch,
            "heads": sizes.heads,
            "dtype": sizes.dtype,
        }

    def demands(self, config: Config, target: Target, sizes: Sizes) -> list[Demand]:
        """Of the mean program; keys are counted as far as its last step reads them."""
        tiles = tiles_of(sequences_of(sizes.lengths()), config.rows)
        steps = sum(steps_of(sizes, config))
        step = config.keys * (WIDTH + VALUE) * BYTES[sizes.dtype]
        queries = config.rows * WIDTH * BYTES[sizes.dtype]
        moved = BYTES[sizes.dtype] * (sizes.queries * WIDTH + sizes.keys * (WIDTH + VALUE))
        return [
            Demand(
                kernel="flash_kernel",
                programs=sizes.heads * len(tiles),
                flops=2.0 * config.rows * config.keys * (WIDTH + VALUE) * steps / len(tiles),
                dtype=sizes.dtype,
                read=queries + step * steps / len(tiles),
                in_flight=step * max(1, config.stages - 1),
                moved=sizes.heads * (moved + sizes.queries * VALUE * BYTES["bf16"]),
            )
        ]

    def workspace(self, sizes: Sizes) -> int:
        """The list of tiles, and on a CPU an output in fp32."""
        tiles = sizes.queries // 64 + sizes.batch
        return 8 * tiles + sizes.queries * sizes.heads * VALUE * 4

    def interpreted_s(self, sizes: Sizes) -> float:
        steps = steps_of(sizes, self.heuristic(CPU, sizes))
        return INTERPRETED_STEP_S * sizes.heads * sum(n + 1 for n in steps)

    def prepare_with(
        self, config: Config, target: Target, operands: MhaPrefillOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        return _FlashVarlen(operands, out, config)


def steps_of(sizes: Sizes, config: Config) -> list[int]:
    """Of the loop of each tile."""
    return [
        math.ceil(min(prefix + first + config.rows, prefix + new) / config.keys)
        for prefix, new in sizes.lengths()
        for first in range(0, new, config.rows)
    ]


class _FlashVarlen(ConfiguredPrepared):
    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor, config: Config) -> None:
        import torch
        import triton.language as tl

        from kernels.mha_prefill.flash_varlen_jit import flash_kernel

        super().__init__(operands, out)
        interpreted = out.device.type == "cpu"
        # The interpreter truncates where it should round to bf16: there torch rounds the output.
        self.written = torch.empty_like(out, dtype=torch.float32) if interpreted else out
        tiles = tiles_of(operands.sequences, config.rows)
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=out.device)
        heads = operands.q.shape[1]
        self.flash = flash_kernel[(heads, len(tiles))]
        self.options = {
            "score_scale": operands.scale * math.log2(math.e),
            "HEADS": heads,
            "NOPE": NOPE,
            "ROPE": ROPE,
            "VALUE": VALUE,
            "BLOCK_M": config.rows,
            "BLOCK_N": config.keys,
            "PRODUCT": tl.float32 if interpreted else tl.bfloat16,
            **options(config.warps, config.stages, config.instruction),
        }

    def call(self) -> None:
        o = self.operands
        self.flash(o.q, o.k, o.v, self.written, o.cu_q, o.cu_k, self.tiles, **self.options)
        if self.written is not self.out:
            self.out.copy_(self.written)
