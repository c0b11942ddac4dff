"""The suite's block-scale GEMM in TileLang's language.

Written after TileLang 0.1.15's documentation and examples/deepseek_deepgemm. Its T.gemm is wgmma on sm_90,
mma on sm_100 (not tcgen05, which wants tensor memory), and mfma on gfx942 and gfx950. Checked by TileLang's
own compiler for CPUs, compiled offline for these four, untested on hardware.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kernels import platform as platforms
from kernels.binding import Function, VendorFunction
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import TileLang

if TYPE_CHECKING:
    import torch

MULTIPLY = Function(*TileLang.CALL, positions=5)


class GemmTile(NamedTuple):
    """Of a program: its rows, threads, and stages of the pipeline."""

    rows: int
    threads: int
    stages: int


TILES = {
    "cuda": (GemmTile(64, 128, 4), GemmTile(128, 256, 4)),
    "rocm": (GemmTile(16, 256, 1), GemmTile(64, 256, 1)),
}
"""For few rows, as many as the least tile, and for more: wgmma takes 64 rows, mfma 16."""


class TileLangGemm(TileLang):
    """One program for each tile of the output; K is not split."""

    name = "tilelang.tiled"
    symbols: ClassVar = (*TileLang.symbols, MULTIPLY)

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return need(sizes.k % BLOCK == 0, f"needs k to be a multiple of {BLOCK}")

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        return _TileLangGemm(operands, out)


class _TileLangGemm(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        o = operands
        few, many = TILES[platforms.of(out.device).kind]
        tile = few if o.m <= few.rows else many
        kernel = compiled(*o.b_q.shape, str(o.b_q.dtype).removeprefix("torch."), tile)
        self.multiply = MULTIPLY.bind(o.a_q, o.a_scale, o.b_q, o.b_scale, out, of=kernel)

    def call(self) -> None:
        self.multiply()


@functools.cache
def compiled(n: int, k: int, fp8: str, tile: GemmTile) -> VendorFunction:
    """The kernel for any number of rows. Raises Unsupported and BindingError."""
    TileLang.COMPILE.at()  # before the source imports TileLang
    from kernels.block_scale_gemm.providers.tilelang_jit import scaled_product

    return TileLang.COMPILE.bind(func=scaled_product(n, k, fp8, *tile))()
