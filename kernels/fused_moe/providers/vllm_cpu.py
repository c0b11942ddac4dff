"""vLLM's CPU kernels for MoE: that for FP8, by which it serves DeepSeek, and those for bf16 weights."""

from __future__ import annotations

import os

from kernels.binding import Function, Symbol
from kernels.formats import BLOCK
from kernels.fused_moe.layouts import W13AndW2, weights_in_bf16
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes
from kernels.lazy import torch
from kernels.op import Call, implementation
from kernels.support import Support, need
from kernels.vendor import VllmCpu, vllm_operator

PACK = vllm_operator("convert_weight_packed", positions=1)
FUSED = vllm_operator("fused_experts_cpu", positions=18)
FP8 = Symbol("vllm._custom_ops.CPUQuantMethod.FP8_W8A16")
BF16 = Symbol("vllm._custom_ops.CPUQuantMethod.UNQUANT")
VEC = Function("vllm._custom_ops.cpu_fused_moe", positions=10)
VEC_PACK = Function("vllm._custom_ops.cpu_prepack_moe_weight", positions=1, needs="isa")


class Moe(VllmCpu):
    boundaries = ("with_quant",)
    rebinds = True
    since = "0.25"  # the first that was read to have `fused_experts_cpu`
    onednn_isa = "AVX512_CORE_BF16"

    def fits(self, sizes: FusedMoeSizes) -> Support:
        return need(sizes.ep == 1, "counts an id of -1 outside its table: needs ep=1")

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """In bf16 gate, up, h and expert outputs; for each thread 32 rows of x, 1024 of unpacked weights."""
        per_thread = (32 + 1024) * max(sizes.hidden, sizes.inter) * 2
        return sizes.pairs * (3 * sizes.inter + sizes.hidden) * 2 + (os.cpu_count() or 1) * per_thread


class MoeInBf16(Moe):
    """The weights are dequantised to bf16 once, as if vLLM served the model in bf16: twice their bytes."""

    def layout(self, sizes: FusedMoeSizes) -> int:
        return 2 * sizes.local_experts * sizes.expert_values

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """Also, at most, an expert in bf16 before and after it is packed."""
        return super().workspace(sizes) + 2 * 2 * sizes.expert_values


@implementation(
    "vllm.amx",
    Moe,
    requires="vLLM's CPU build, AVX-512 (AMX tiles where the CPU has them)",
    symbols=(FUSED, PACK, FP8),
    stationary=lambda operands: (PACK.bind(operands.w13)(), PACK.bind(operands.w2)()),
    fits=lambda sizes: need(sizes.fp8 == "e4m3fn", f"takes e4m3fn, not {sizes.fp8}"),
    layout=lambda sizes: sizes.local_experts * sizes.expert_values,
)
def amx(operands: FusedMoeOperands, out: torch.Tensor, weights: W13AndW2) -> Call:
    """`fused_experts_cpu` (SGLang's CPU kernel), called as by CPUExpertsFp8 in vLLM's
    fused_moe/experts/cpu_moe.py: bf16 activations, FP8 weights with block scales. It is built on oneDNN's
    brgemm, which uses AMX tiles where the CPU has them, and AVX-512 where it does not."""
    no_zeros_or_biases, no_limits, is_packed = (None,) * 3, (None,) * 4, True
    tensors = (out, operands.x, *weights, operands.topk_weights, operands.topk_ids)
    scales = (operands.w13_scale, operands.w2_scale, *no_zeros_or_biases, [BLOCK, BLOCK], *no_limits)
    return FUSED.bind(*tensors, FP8.find(), *scales, is_packed)


@implementation(
    "vllm.brgemm_bf16",
    MoeInBf16,
    symbols=(FUSED, PACK, BF16),
    stationary=lambda operands: weights_in_bf16(operands, lambda w: PACK.bind(w)()),
)
def brgemm_bf16(operands: FusedMoeOperands, out: torch.Tensor, weights: W13AndW2) -> Call:
    """`fused_experts_cpu` without quantisation."""
    no_scales_biases_or_limits, is_packed = (None,) * 10, True
    tensors = (out, operands.x, *weights, operands.topk_weights, operands.topk_ids)
    return FUSED.bind(*tensors, BF16.find(), *no_scales_biases_or_limits, is_packed)


@implementation(
    "vllm.vec",
    MoeInBf16,
    requires="vLLM's CPU build, AVX-512",
    since="0.20",  # the first that was read to have it
    symbols=(VEC, VEC_PACK, vllm_operator("cpu_fused_moe", positions=11)),
    onednn_isa="",  # it does not call oneDNN
    stationary=lambda operands: weights_in_bf16(operands, lambda w: VEC_PACK.bind(w, isa="vec")()),
)
def vec(operands: FusedMoeOperands, out: torch.Tensor, weights: W13AndW2) -> Call:
    """`cpu_fused_moe`, vLLM's own grouped product, in its AVX-512 variant: CPUUnquantizedExperts."""
    no_bias, x, picks = None, operands.x, (operands.topk_weights, operands.topk_ids)
    return VEC.bind(out, x, *weights, no_bias, no_bias, *picks, "silu", "vec")
