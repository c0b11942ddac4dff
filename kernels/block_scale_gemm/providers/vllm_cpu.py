"""vLLM's CPU kernels for linear layers: the one for FP8 with block scales, with which it serves DeepSeek on
Xeons, and those for bf16, which get dequantised weights.

Sources, vLLM 0.32: vllm/model_executor/kernels/linear/scaled_mm/cpu.py for FP8; dispatch_cpu_unquantized_gemm
in vllm/model_executor/layers/utils.py for bf16.
"""

from __future__ import annotations

from kernels.binding import Function
from kernels.block_scale_gemm.layouts import multiples
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.fp8_to_fp32 import fp8_to_bf16
from kernels.lazy import torch
from kernels.op import Call, implementation
from kernels.support import Support, need
from kernels.vendor import VllmCpu, vllm_operator

PACK = vllm_operator("convert_weight_packed", positions=1)
FP8 = vllm_operator("fp8_scaled_mm_cpu", positions=7)
BRGEMM = vllm_operator("weight_packed_linear", positions=5)
ONEDNN = Function("vllm._custom_ops.onednn_mm", positions=3)
ONEDNN_PACK = Function("vllm._custom_ops.create_onednn_mm", positions=2)

STEP = 32  # N and K of weights that PACK takes are multiples of this
ONEDNN_ROWS = 32  # rows that vLLM has oneDNN pack for


class OfBf16(VllmCpu):
    """Takes bf16 activations."""

    boundaries = ("with_quant",)
    rebinds = True


def takes_fp8(sizes: BlockScaleGemmSizes) -> Support:
    is_taken = need(sizes.fp8 == "e4m3fn", f"takes e4m3fn, not {sizes.fp8}")
    return Support.all_of(is_taken, multiples(sizes, STEP, STEP))


def of_fp8(operands: BlockScaleGemmOperands, weights: torch.Tensor, packed: bool) -> Call:
    o, blocks = operands, [BLOCK, BLOCK]
    return FP8.bind(o.a, weights, o.b_scale, blocks, None, torch.bfloat16, packed)


@implementation(
    "vllm.amx",
    OfBf16,
    symbols=(FP8, PACK),
    onednn_isa="AVX512_CORE_BF16",
    allocates=True,
    stationary=lambda operands: PACK.bind(operands.b_q)(),
    fits=takes_fp8,
    layout=lambda sizes: sizes.n * sizes.k,
)
def amx(operands: BlockScaleGemmOperands, out: None, weights: torch.Tensor) -> Call:
    """`fp8_scaled_mm_cpu` (SGLang's CPU kernel), of CPUFp8BlockScaledMMKernel: W8A16. It is built on oneDNN's
    brgemm, which uses AMX tiles where the CPU has them, and AVX-512 where it does not."""
    return of_fp8(operands, weights, packed=True)


@implementation(
    "vllm.amx_unpacked",
    OfBf16,
    symbols=(FP8, PACK),
    onednn_isa="AVX512_CORE_BF16",
    allocates=True,
    fits=takes_fp8,
    workspace=lambda sizes: sizes.n * sizes.k,
)
def amx_unpacked(operands: BlockScaleGemmOperands, out: None) -> Call:
    """The same kernel on weights as they are in the checkpoint, which each call packs again: the cost in an
    engine that does not pack them once."""
    return of_fp8(operands, operands.b_q, packed=False)


@implementation(
    "vllm.onednn",
    OfBf16,
    symbols=(ONEDNN, ONEDNN_PACK, vllm_operator("onednn_mm", positions=4)),
    onednn_isa="AVX512_CORE",
    allocates=True,
    stationary=lambda operands: ONEDNN_PACK.bind(
        fp8_to_bf16(operands.b_q, operands.b_scale).t(), ONEDNN_ROWS
    )(),
    layout=lambda sizes: 2 * sizes.n * sizes.k,
)
def onednn(operands: BlockScaleGemmOperands, out: None, handler: object) -> Call:
    """`onednn_mm`: oneDNN's matmul, vLLM's choice for bf16 linears on x86-64. The weights are dequantised to
    bf16 and packed once, as if vLLM served the model in bf16: twice the bytes of weights."""
    return ONEDNN.bind(handler, operands.a, None)


@implementation(
    "vllm.brgemm_bf16",
    OfBf16,
    symbols=(BRGEMM, PACK),
    onednn_isa="AVX512_CORE_BF16",
    stationary=lambda operands: PACK.bind(fp8_to_bf16(operands.b_q, operands.b_scale))(),
    fits=lambda sizes: multiples(sizes, STEP, STEP),
    layout=lambda sizes: 2 * sizes.n * sizes.k,
)
def brgemm_bf16(operands: BlockScaleGemmOperands, out: torch.Tensor, packed: torch.Tensor) -> Call:
    """`weight_packed_linear` (SGLang's CPU kernel), built on oneDNN's brgemm: vLLM's with
    VLLM_CPU_SGL_KERNEL. The weights are dequantised to bf16 and packed once, as for `vllm.onednn`."""
    is_packed = True
    return BRGEMM.bind(out, operands.a, packed, None, is_packed)
