"""cuBLASLt's block-scaled FP8 product, through torch.nn.functional.scaled_mm.

Layouts as in torch's aten/src/ATen/native/cuda/ScaledBlas.cpp, _scaled_block1x128_block128x128: scales of a
lie column by column, those of b with their blocks of K together, padded to a multiple of four.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kernels.binding import Function, Symbol
from kernels.block_scale_gemm.layouts import column_major, padded_rows, rounded_up
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.op import Prepared, Unsupported
from kernels.support import Support, need
from kernels.vendor import Vendor

if TYPE_CHECKING:
    import torch

ROWS = 4  # that cuBLASLt takes a multiple of
K_BLOCKS = 4  # likewise, of the scales of b

MULTIPLY = Function(
    "torch.nn.functional.scaled_mm",
    needs="mat_a mat_b scale_a scale_recipe_a scale_b scale_recipe_b output_dtype",
)
RECIPES = Symbol("torch.nn.functional.ScalingType")


class CublasLt(Vendor):
    """Where M is no multiple of four, the call computes rows of zeros up to the next, as in an engine that
    pads its tokens for this kernel."""

    name = "cublaslt"
    library = "torch"
    requires = "torch 2.10 or later with CUDA 12.9 or later, sm_90"
    since = "2.10"
    allocates = True
    kinds = ("cuda",)
    archs = ("sm_90",)  # it takes these scales on no other
    symbols = (MULTIPLY, RECIPES)

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return need(sizes.n % 16 == 0 and sizes.k % 16 == 0, "cuBLASLt needs n and k to be multiples of 16")

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        return 4 * sizes.n_blocks * rounded_up(sizes.k_blocks, K_BLOCKS)

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        m = rounded_up(sizes.m, ROWS)
        return m * (sizes.k + 4 * sizes.k_blocks) + 2 * (m - sizes.m) * sizes.n

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        import torch

        cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")))
        if operands.b_q.device.type == "cuda" and cuda < (12, 9):
            raise Unsupported(
                f"cuBLASLt has these scales from CUDA 12.9; torch was built with {torch.version.cuda}"
            )
        return _CublasLt(operands)


class _CublasLt(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(self, operands: BlockScaleGemmOperands) -> None:
        import torch

        super().__init__(operands)
        recipes = RECIPES.find()
        self.a_q = padded_rows(operands.a_q, ROWS)
        self.a_scale = column_major(padded_rows(operands.a_scale, ROWS))
        self.multiply = MULTIPLY.bind(
            mat_a=self.a_q,
            mat_b=operands.b_q.t(),
            scale_a=self.a_scale,
            scale_recipe_a=recipes.BlockWise1x128,
            scale_b=b_scale_by_blocks_of_k(operands.b_scale),
            scale_recipe_b=recipes.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )

    def inputs(self) -> Mapping[str, torch.Tensor]:
        m = self.operands.m
        return {"a_q": self.a_q[:m], "a_scale": self.a_scale[:m]}

    def call(self) -> None:
        self.out = self.multiply()[: self.operands.m]


def b_scale_by_blocks_of_k(b_scale: torch.Tensor) -> torch.Tensor:
    """[blocks of N, blocks of K] as [blocks of K rounded up to four, blocks of N] with strides (1, that)."""
    n_blocks, k_blocks = b_scale.shape
    padded = b_scale.new_zeros(n_blocks, rounded_up(k_blocks, K_BLOCKS))
    padded[:, :k_blocks] = b_scale
    return padded.t()
