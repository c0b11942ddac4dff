"""The suite's block-scale GEMM in TileLang's language.

Written after TileLang 0.1.15's documentation and examples/deepseek_deepgemm. T.gemm becomes wgmma on sm_90,
mma on sm_100 (not tcgen05, which needs tensor memory), and mfma on gfx942 and gfx950. It is checked with
TileLang's compiler for CPUs and compiled offline for these four. Untested on hardware.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels import platform as platforms
from kernels.binding import Function
from kernels.block_scale_gemm.layouts import multiples
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.lazy import torch
from kernels.op import Call, implementation
from kernels.vendor import TileLang

MULTIPLY = Function(*TileLang.CALL, positions=5)


class GemmTile(NamedTuple):
    """The last arguments of `scaled_product`, in its order."""

    rows: int  # rows of the output that a program computes
    threads: int  # threads of a program
    stages: int  # stages of its pipeline


TILES = {
    "cuda": (GemmTile(64, 128, 4), GemmTile(128, 256, 4)),
    "rocm": (GemmTile(16, 256, 1), GemmTile(64, 256, 1)),
}
"""For each kind of platform two tiles: one where it holds all rows of the output, one for more rows. wgmma
takes 64 rows, mfma 16."""


@implementation("tilelang.tiled", TileLang, symbols=(*TileLang.symbols, MULTIPLY), fits=multiples)
def tiled(operands: BlockScaleGemmOperands, out: torch.Tensor) -> Call:
    """Each tile of the output has one program; K is not split."""
    sizes = operands.sizes
    small_tile, large_tile = TILES[platforms.of(out.device).kind]
    tile = small_tile if sizes.m <= small_tile.rows else large_tile
    fp8 = str(operands.b_q.dtype).removeprefix("torch.")
    sources = "kernels.block_scale_gemm.providers.tilelang_jit"
    kernel = TileLang.compiled(sources, "scaled_product", sizes.n, sizes.k, fp8, *tile)
    a_and_b = (operands.a_q, operands.a_scale, operands.b_q, operands.b_scale)
    return MULTIPLY.bind(*a_and_b, out, method_of=kernel)
