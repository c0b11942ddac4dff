"""FlashInfer's FP8 products: on Hopper TensorRT-LLM's DeepGEMM; on Blackwell CUTLASS, cuTile, TensorRT-LLM.

Read in FlashInfer 0.6.18, its tags from v0.2.8, and 0.7.2.post1: flashinfer/gemm/gemm_base.py, whose
supported_compute_capability says which devices each takes; csrc/fp8_blockscale_gemm_sm90_binding.cu and what
it calls, csrc/nv_internal/tensorrt_llm/deep_gemm/fp8_gemm.cuh; csrc/gemm_groupwise_sm100.cu and
trtllm_gemm_runner.cu; flashinfer/gemm/kernels/cutile/gemm_fp8_nt_groupwise_cutile.py. The row for Hopper ran
on an H200 (0.6.16); the others are untested on hardware.
"""

from __future__ import annotations

from kernels import vendor
from kernels.binding import Function
from kernels.block_scale_gemm.layouts import (
    column_major,
    multiples,
    padded,
    padded_rows,
    prepared,
    rounded_up,
)
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.lazy import torch
from kernels.op import Call, Prepared, implementation
from kernels.support import Support, need

ROWS = 4  # the kernel for sm_90 and CUTLASS's read the fp32 scales of so many rows at a time: 16 bytes
TWO_SMS_ROWS = 256  # rows from which an instruction over two SMs is faster (gemm_fp8_nt_groupwise)
WORKSPACE = 32 << 20  # bytes that gemm_fp8_nt_groupwise allocates
TRTLLM_K = 256  # the least K that TensorRT-LLM's kernels take

SM90 = Function("flashinfer.gemm.fp8_blockscale_gemm_sm90", needs="input weight input_scale weight_scale out")
CUTLASS = Function(
    "flashinfer.gemm.gemm_fp8_nt_groupwise",
    needs="a b a_scale b_scale scale_major_mode mma_sm scale_granularity_mnk out",
    wishes="backend",  # before 0.2.9 it was CUTLASS alone
)
# The same function with other backends, which do not take CUTLASS's mma_sm.
OTHER_BACKENDS = Function(
    "flashinfer.gemm.gemm_fp8_nt_groupwise",
    needs="a b a_scale b_scale scale_major_mode scale_granularity_mnk out backend",
)


class FlashInferGemm(vendor.FlashInfer):
    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return multiples(sizes, 64)


def quantising_bytes(sizes: BlockScaleGemmSizes) -> int:
    """The bytes of `sm90`: FP8 values and fp32 scales of both operands, which each call allocates even where
    it quantises neither; and the column-major copy of the scales of a."""
    m = rounded_up(sizes.m, ROWS)
    return (m + sizes.n) * sizes.k + 4 * sizes.k_blocks * (m + sizes.n_blocks + m)


@implementation(
    "flashinfer.sm90",
    FlashInferGemm,
    requires="FlashInfer 0.6.0 or later (read to 0.7.2), CUDA 12.8 or later, sm_90",
    since="0.6.0",
    boundaries=("core", "with_quant"),
    activations="fp8",
    archs=("sm_90",),
    symbols=(SM90,),
    workspace=quantising_bytes,
)
def sm90(operands: BlockScaleGemmOperands, out: torch.Tensor) -> Call | Prepared:
    """The library transposes the product below 32 rows. Within the call it quantises bf16 activations in a
    kernel of its own, with fp32 scales. Engines give it only bf16 activations; `core` gives it FP8."""
    weights = {"weight": operands.b_q, "weight_scale": operands.b_scale}
    if operands.a is not None:
        return SM90.bind(input=operands.a, input_scale=None, **weights, out=out)
    a_scale = column_major(operands.a_scale, ROWS)  # the kernel assumes this stride
    multiply = SM90.bind(input=operands.a_q, input_scale=a_scale.t(), **weights, out=out)
    return prepared(operands, out, multiply, a_scale=a_scale)


@implementation(
    "flashinfer.groupwise",
    FlashInferGemm,
    requires="FlashInfer 0.2.8 or later (read to 0.7.2), sm_100 or sm_103",
    since="0.2.8",
    archs=vendor.BLACKWELL,
    symbols=(CUTLASS,),
    layout=lambda sizes: 4 * sizes.n_blocks * sizes.k_blocks,
    workspace=lambda sizes: (
        rounded_up(sizes.m, ROWS) * (sizes.k + 4 * sizes.k_blocks + 2 * sizes.n) + WORKSPACE
    ),
)
def groupwise(operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
    """The CUTLASS kernel. Where M is not a multiple of four, the call also computes the rows of zeros up to
    the next multiple. The scales of both operands are contiguous along M and N, the faster of the two ways
    that the kernel takes (include/flashinfer/gemm/gemm_groupwise_sm100.cuh)."""
    padded_out = padded_rows(out, ROWS)
    a_q, a_scale = padded(operands, ROWS)
    multiply = CUTLASS.bind(
        a=a_q, a_scale=a_scale.t(), b=operands.b_q, b_scale=operands.b_scale.t().contiguous(),
        scale_major_mode="MN", scale_granularity_mnk=(1, BLOCK, BLOCK), out=padded_out, backend="cutlass",
        mma_sm=2 if len(padded_out) >= TWO_SMS_ROWS else 1,
    )  # fmt: skip
    return prepared(operands, padded_out[: operands.sizes.m], multiply, a_q, a_scale)


@implementation(
    "flashinfer.trtllm",
    FlashInferGemm,
    requires="FlashInfer 0.2.9 or later (read to 0.7.2), sm_100 or sm_103",
    since="0.2.9",
    archs=vendor.BLACKWELL,
    symbols=(OTHER_BACKENDS,),
    fits=lambda sizes: need(sizes.k >= TRTLLM_K, f"needs k to be {TRTLLM_K} at least"),
    workspace=lambda sizes: 4 * sizes.m * sizes.k_blocks + WORKSPACE,
)
def trtllm(operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
    """TensorRT-LLM's generated kernel, which is downloaded at the first call. The arguments are those of
    flashinfer_gemm_w8a8_block_fp8_linear_with_fallback in SGLang's srt/layers/quantization/fp8_utils.py
    (0.5.23), which adds no rows where M is not a multiple of four."""
    a_scale = column_major(operands.a_scale)
    multiply = with_b(operands, out, a_scale=a_scale, scale_major_mode=None, backend="trtllm")
    return prepared(operands, out, multiply, a_scale=a_scale)


@implementation(
    "flashinfer.cutile",
    FlashInferGemm,
    requires=(
        "FlashInfer 0.6.14 or later (read to 0.7.2) with cuda-tile and its compiler, sm_100, sm_103 or sm_120"
    ),
    since="0.6.14",
    archs=(*vendor.BLACKWELL, "sm_120"),
    also=("cuda.tile",),
    symbols=(OTHER_BACKENDS,),
    workspace=lambda sizes: WORKSPACE,
)
def cutile(operands: BlockScaleGemmOperands, out: torch.Tensor) -> Call:
    """NVIDIA's kernel in Python, which takes all operands as they are. The first call at these sizes tunes
    the kernel, and each call first fills the output with zeros. No engine runs it."""
    return with_b(operands, out, a_scale=operands.a_scale, scale_major_mode="K", backend="cutile")


def with_b(operands: BlockScaleGemmOperands, out: torch.Tensor, **arguments: object) -> Call:
    """The product, with b and its scales in the canonical layout. arguments: what differs between rows"""
    return OTHER_BACKENDS.bind(
        a=operands.a_q, b=operands.b_q, b_scale=operands.b_scale, out=out,
        scale_granularity_mnk=(1, BLOCK, BLOCK), **arguments,
    )  # fmt: skip
