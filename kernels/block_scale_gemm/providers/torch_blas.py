"""The BLAS libraries of torch: cuBLASLt has a product with block scales, hipBLASLt has none.

cuBLASLt: torch.nn.functional.scaled_mm. Layouts as in torch's aten/src/ATen/native/cuda/ScaledBlas.cpp,
_scaled_block1x128_block128x128: the scales of a lie column by column; the scales of b have the blocks of K
next to each other, padded to a multiple of four.

hipBLASLt: the weights are dequantised to bf16 for its bf16 product. Its row-wise FP8 product is not a row
here, because both operands would have to be quantised again with one scale per row. In `core` such outputs
err by 13 to 16 sigma, where 2 are allowed. In `with_quant` they would pass, with 1.2 to 1.4 sigma, and be
ranked with kernels that keep the weights exact. `doctor` measures such FP8 products as the ceiling of fp8.
"""

from __future__ import annotations

from kernels.binding import Function, Symbol
from kernels.block_scale_gemm import layouts
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.providers.torch_eager import DEQUANTISED, bf16_product
from kernels.lazy import torch
from kernels.op import Call, Prepared, Unsupported, implementation
from kernels.vendor import Vendor, is_older

ROWS = 4  # M that cuBLASLt takes is a multiple of this
K_BLOCKS = 4  # and so is the number of blocks of K in the scales of b

MULTIPLY = Function(
    "torch.nn.functional.scaled_mm",
    needs="mat_a mat_b scale_a scale_recipe_a scale_b scale_recipe_b output_dtype",
)
RECIPES = Symbol("torch.nn.functional.ScalingType")
PREFERRED = Function("torch.backends.cuda.preferred_blas_library")


@implementation(
    "cublaslt",
    Vendor,
    library="torch",
    requires="torch 2.10 or later with CUDA 12.9 or later, sm_90",
    since="2.10",
    allocates=True,
    kinds=("cuda",),
    archs=("sm_90",),  # cuBLASLt takes these scales only there
    symbols=(MULTIPLY, RECIPES),
    fits=lambda sizes: layouts.multiples(sizes, 16, 16),
    layout=lambda sizes: 4 * sizes.n_blocks * layouts.rounded_up(sizes.k_blocks, K_BLOCKS),
    workspace=lambda sizes: layouts.padding_bytes(sizes, ROWS),
)
def cublaslt(operands: BlockScaleGemmOperands, out: None) -> Prepared:
    """Where M is not a multiple of four, the call also computes the rows of zeros up to the next multiple, as
    an engine does that pads its tokens for this kernel."""
    if operands.b_q.device.type == "cuda" and is_older(torch.version.cuda or "0", "12.9"):
        raise Unsupported(
            f"cuBLASLt has these scales from CUDA 12.9; torch was built with {torch.version.cuda}"
        )
    recipes = RECIPES.find()
    b_scale = layouts.column_major(layouts.padded_rows(operands.b_scale.t(), K_BLOCKS))
    a_q, a_scale = layouts.padded(operands, ROWS)
    multiply = MULTIPLY.bind(
        mat_a=a_q, scale_a=a_scale, scale_recipe_a=recipes.BlockWise1x128,
        mat_b=operands.b_q.t(), scale_b=b_scale, scale_recipe_b=recipes.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return layouts.prepared(operands, out, multiply, a_q, a_scale)


@implementation(
    "hipblaslt.dequantised",
    Vendor,
    library="torch",
    requires="torch for ROCm with hipBLASLt (read in 2.13)",
    runtime="hipblaslt",
    kinds=("rocm",),
    any_fp8=True,
    symbols=(PREFERRED,),
    environment=lambda platform: {"TORCH_BLAS_PREFER_HIPBLASLT": "1"},
    **DEQUANTISED,
)
def hipblaslt(operands: BlockScaleGemmOperands, out: torch.Tensor) -> Call:
    """`torch.bf16` with hipBLASLt. For some sizes, versions and architectures torch would choose hipBLAS
    (TORCH_BLAS_PREFER_HIPBLASLT in torch's aten/src/ATen/Context.h)."""
    library = PREFERRED.bind()().name
    if out.device.type != "cpu" and library != "Cublaslt":  # torch's name for hipBLASLt too
        raise Unsupported(f"torch {torch.__version__} does not take hipBLASLt here, but {library}")
    return bf16_product(operands, out)
