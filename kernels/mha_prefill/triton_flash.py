"""The suite's own MHA prefill in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels.mha_prefill.problem import (
    NOPE,
    ROPE,
    VALUE,
    MhaPrefillOperands,
    Sequence,
    Sizes,
    sequences_of,
    takes,
)
from kernels.op import Prepared, Support
from kernels.triton_runtime import SuiteTriton, Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tile:
    """What one program takes.

    rows:    query rows
    keys:    keys per step of its loop
    options: Triton's own (warps, pipeline stages, shape of the matrix instruction)
    """

    rows: int
    keys: int
    options: Mapping[str, int] = field(default_factory=dict)


# From compiling, not yet from measuring: the largest without a spill on any architecture of the platform.
TILES = {
    "cuda": Tile(128, 64, {"num_warps": 8, "num_stages": 3}),
    "rocm": Tile(128, 32, {"num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": 16}),
    "cpu": Tile(128, 128),
}
INTERPRETED_STEP_S = 4e-3  # of a step over 128 rows and 128 keys, and of a program around its steps


def tiles_of(sequences: list[Sequence], tile: Tile) -> list[tuple[int, int]]:
    """(sequence, first row) of every program, those with the most keys first, so that none is left to run
    alone at the end."""
    tiles = [(i, first) for i, s in enumerate(sequences) for first in range(0, s.new, tile.rows)]
    return sorted(tiles, key=lambda at: -(sequences[at[0]].prefix + at[1]))


class FlashVarlen(SuiteTriton):
    """One program per tile of a sequence's query rows; blocks of keys above the diagonal are skipped, only
    those on it are masked. q and k are multiplied in parts of 128 and 64, nothing is padded."""

    name = "triton.flash_varlen"

    def fits(self, sizes: Sizes) -> Support:
        return takes(sizes, "bf16")

    def workspace(self, sizes: Sizes) -> int:
        """The list of tiles, and on a CPU an output in fp32."""
        smallest = min(tile.rows for tile in TILES.values())
        tiles = sizes.queries // smallest + sizes.batch
        return 8 * tiles + sizes.queries * sizes.heads * VALUE * 4

    def interpreted_s(self, sizes: Sizes) -> float:
        sequences, tile = sequences_of(sizes.lengths()), TILES["cpu"]
        tiles = tiles_of(sequences, tile)
        steps = sum(-(-(sequences[i].prefix + first + tile.rows) // tile.keys) + 1 for i, first in tiles)
        return INTERPRETED_STEP_S * sizes.heads * steps

    def prepare_for(self, target: Target, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _FlashVarlen(operands, out, target.choose(TILES))


class _FlashVarlen(Prepared):
    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor, tile: Tile) -> None:
        import torch
        import triton.language as tl

        from kernels.mha_prefill.flash_varlen_jit import flash_kernel

        super().__init__(operands, out)
        interpreted = out.device.type == "cpu"
        # The interpreter truncates where it should round to bf16: there torch rounds the output.
        self.written = torch.empty_like(out, dtype=torch.float32) if interpreted else out
        tiles = tiles_of(operands.sequences, tile)
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=out.device)
        heads = operands.q.shape[1]
        self.flash = flash_kernel[(heads, len(tiles))]
        self.options = {
            "score_scale": operands.scale * math.log2(math.e),
            "HEADS": heads,
            "NOPE": NOPE,
            "ROPE": ROPE,
            "VALUE": VALUE,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            "PRODUCT": tl.float32 if interpreted else tl.bfloat16,
            **tile.options,
        }

    def call(self) -> None:
        o = self.operands
        self.flash(o.q, o.k, o.v, self.written, o.cu_q, o.cu_k, self.tiles, **self.options)
        if self.written is not self.out:
            self.out.copy_(self.written)
