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
ONEDNN_OPERATOR = vllm_operator("onednn_mm", positions=4)  # which the function ONEDNN calls
ONEDNN_PACK = Function("vllm._custom_ops.create_onednn_mm", positions=2)

STEP = 32  # N and K of weights that PACK takes are multiples of this
ONEDNN_ROWS = 32  # the number of tokens for which vLLM has oneDNN choose the layout of packed weights


class TakesBf16(VllmCpu):
    """Takes bf16 activations."""

    boundaries = ("with_quant",)
    rebinds = True
    onednn_isa = "AVX512_CORE_BF16"


class Fp8Weights(TakesBf16):
    """Calls SGLang's CPU kernel `fp8_scaled_mm_cpu` as vLLM's CPUFp8BlockScaledMMKernel does: W8A16. It is
    built on oneDNN's brgemm, which uses AMX tiles where the CPU has them, and AVX-512 where it does not."""

    allocates = True
    symbols = (FP8, PACK)

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        is_e4m3fn = need(sizes.fp8 == "e4m3fn", f"takes e4m3fn, not {sizes.fp8}")
        return Support.all_of(is_e4m3fn, multiples(sizes, STEP, STEP))


def fp8_product(operands: BlockScaleGemmOperands, weights: torch.Tensor, is_packed: bool) -> Call:
    block_size, no_bias, out_dtype = [BLOCK, BLOCK], None, torch.bfloat16
    return FP8.bind(operands.a, weights, operands.b_scale, block_size, no_bias, out_dtype, is_packed)


@implementation(
    "vllm.amx",
    Fp8Weights,
    stationary=lambda operands: PACK.bind(operands.b_q)(),
    layout=lambda sizes: sizes.n * sizes.k,
)
def amx(operands: BlockScaleGemmOperands, out: None, weights: torch.Tensor) -> Call:
    """The weights are packed once, as the engine packs them."""
    return fp8_product(operands, weights, is_packed=True)


@implementation("vllm.amx_unpacked", Fp8Weights, workspace=lambda sizes: sizes.n * sizes.k)
def amx_unpacked(operands: BlockScaleGemmOperands, out: None) -> Call:
    """The weights are as in the checkpoint, and each call packs them again: the cost in an engine that does
    not pack them once."""
    return fp8_product(operands, operands.b_q, is_packed=False)


@implementation(
    "vllm.onednn",
    TakesBf16,
    symbols=(ONEDNN, ONEDNN_PACK, ONEDNN_OPERATOR),
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
    no_bias = None
    return ONEDNN.bind(handler, operands.a, no_bias)


@implementation(
    "vllm.brgemm_bf16",
    TakesBf16,
    symbols=(BRGEMM, PACK),
    stationary=lambda operands: PACK.bind(fp8_to_bf16(operands.b_q, operands.b_scale))(),
    fits=lambda sizes: multiples(sizes, STEP, STEP),
    layout=lambda sizes: 2 * sizes.n * sizes.k,
)
def brgemm_bf16(operands: BlockScaleGemmOperands, out: torch.Tensor, packed: torch.Tensor) -> Call:
    """`weight_packed_linear` (SGLang's CPU kernel), built on oneDNN's brgemm: vLLM's choice if
    VLLM_CPU_SGL_KERNEL is set. The weights are dequantised to bf16 and packed once, as for `vllm.onednn`."""
    no_bias, is_packed = None, True
    return BRGEMM.bind(out, operands.a, packed, no_bias, is_packed)
