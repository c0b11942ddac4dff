"""vLLM's CPU kernels for MoE: the one for FP8, that it serves DeepSeek with on x86-64 servers, and those for
bf16, which take dequantised weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.binding import Function, Symbol
from kernels.formats import BLOCK
from kernels.fp8_to_fp32 import fp8_to_bf16
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import VllmCpu, vllm_operator

if TYPE_CHECKING:
    import torch

PACK = vllm_operator("convert_weight_packed", positions=1)
FUSED = vllm_operator("fused_experts_cpu", positions=18)
FP8, BF16 = (Symbol(f"vllm._custom_ops.CPUQuantMethod.{method}") for method in ("FP8_W8A16", "UNQUANT"))
VEC = Function("vllm._custom_ops.cpu_fused_moe", positions=10)
VEC_PACK = Function("vllm._custom_ops.cpu_prepack_moe_weight", positions=1, needs="isa")


def pack_brgemm(weights: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = PACK.bind(weights)()
    return packed


def pack_vec(weights: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = VEC_PACK.bind(weights, isa="vec")()
    return packed


class AmxMoe(VllmCpu):
    """`fused_experts_cpu` (SGLang's CPU kernel), called as CPUExpertsFp8 in vLLM's
    fused_moe/experts/cpu_moe.py calls it: bf16 activations, FP8 weights with block scales. Built on oneDNN's
    brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not."""

    name = "vllm.amx"
    since = "0.25"  # the first that was read to have it
    requires = "vLLM's CPU build, AVX-512 (AMX tiles where the CPU has them)"
    symbols = (FUSED, PACK, FP8)
    onednn_isa = "AVX512_CORE_BF16"
    boundaries = ("with_quant",)
    rebinds = True

    def fits(self, sizes: FusedMoeSizes) -> Support:
        return Support.all_of(
            need(sizes.fp8 == "e4m3fn", f"takes e4m3fn, not {sizes.fp8}"),
            need(sizes.ep == 1, "counts every id, and an id of -1 outside its table: needs ep=1"),
        )

    def layout(self, sizes: FusedMoeSizes) -> int:
        return sizes.local_experts * 3 * sizes.hidden * sizes.inter

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """Its caches: gate and up, h, what experts give; per thread 32 rows of x and unpacked weights."""
        pairs = sizes.tokens * sizes.picks
        per_thread = (32 + 32 * 32) * max(sizes.hidden, sizes.inter) * 2
        return pairs * (3 * sizes.inter + sizes.hidden) * 2 + (os.cpu_count() or 1) * per_thread

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def prepare_turn(self, first: _AmxMoe | None, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return _AmxMoe(operands, out, first)


class _AmxMoe(Prepared):
    operands: FusedMoeOperands

    def __init__(self, operands: FusedMoeOperands, out: torch.Tensor, first: _AmxMoe | None) -> None:
        super().__init__(operands, out)
        o, same = operands, first if first is not None and first.operands.w13 is operands.w13 else None
        self.w13: torch.Tensor = same.w13 if same else pack_brgemm(o.w13)
        self.w2: torch.Tensor = same.w2 if same else pack_brgemm(o.w2)
        self.compute = FUSED.bind(
            out,
            o.x,
            self.w13,
            self.w2,
            o.topk_weights,
            o.topk_ids,
            FP8.find(),
            o.w13_scale,
            o.w2_scale,
            None,
            None,
            None,
            [BLOCK, BLOCK],
            None,
            None,
            None,
            None,
            True,
        )

    def call(self) -> None:
        self.compute()


class DequantisedMoe(VllmCpu):
    """Weights dequantised to bf16 once, as vLLM would serve the model in bf16: twice the bytes of weights."""

    boundaries = ("with_quant",)
    rebinds = True

    def fits(self, sizes: FusedMoeSizes) -> Support:
        return need(sizes.ep == 1, "counts every id, and an id of -1 outside its table: needs ep=1")

    def layout(self, sizes: FusedMoeSizes) -> int:
        return 2 * sizes.local_experts * 3 * sizes.hidden * sizes.inter

    def workspace(self, sizes: FusedMoeSizes) -> int:
        return AmxMoe().workspace(sizes) + 4 * 3 * sizes.hidden * sizes.inter

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return self.prepare_turn(None, operands, out)


class BrgemmMoe(DequantisedMoe):
    """`fused_experts_cpu` without quantisation."""

    name = "vllm.brgemm_bf16"
    since = "0.25"  # the first that was read to have it
    symbols = (FUSED, PACK, BF16)
    onednn_isa = "AVX512_CORE_BF16"

    def prepare_turn(
        self, first: _BrgemmMoe | None, operands: FusedMoeOperands, out: torch.Tensor
    ) -> Prepared:
        return _BrgemmMoe(operands, out, first)


class VecMoe(DequantisedMoe):
    """`cpu_fused_moe`, vLLM's own grouped product, in its AVX-512 variant: CPUUnquantizedExperts."""

    name = "vllm.vec"
    since = "0.20"  # the first that was read to have it
    requires = "vLLM's CPU build, AVX-512"
    symbols = (VEC, VEC_PACK, vllm_operator("cpu_fused_moe", positions=11))

    def prepare_turn(self, first: _VecMoe | None, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return _VecMoe(operands, out, first)


def _packed(
    operands: FusedMoeOperands, name: str, pack: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """bf16 [local, N, K] as `pack` arranges each expert, one at a time: memory never holds both."""
    import torch

    values, scales = getattr(operands, name), getattr(operands, f"{name}_scale")
    packed = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    for expert, value, scale in zip(packed, values, scales, strict=True):
        expert.copy_(pack(fp8_to_bf16(value, scale)[None])[0])
    return packed


def _is_shared(first: _BrgemmMoe | _VecMoe | None, operands: FusedMoeOperands) -> bool:
    return first is not None and first.operands.w13 is operands.w13


class _BrgemmMoe(Prepared):
    operands: FusedMoeOperands

    def __init__(self, operands: FusedMoeOperands, out: torch.Tensor, first: _BrgemmMoe | None) -> None:
        super().__init__(operands, out)
        o, same = operands, first if first is not None and _is_shared(first, operands) else None
        self.w13: torch.Tensor = same.w13 if same else _packed(o, "w13", pack_brgemm)
        self.w2: torch.Tensor = same.w2 if same else _packed(o, "w2", pack_brgemm)
        weights, no_scales_biases_or_limits = (self.w13, self.w2, o.topk_weights, o.topk_ids), (None,) * 10
        self.compute = FUSED.bind(out, o.x, *weights, BF16.find(), *no_scales_biases_or_limits, True)

    def call(self) -> None:
        self.compute()


class _VecMoe(Prepared):
    operands: FusedMoeOperands

    def __init__(self, operands: FusedMoeOperands, out: torch.Tensor, first: _VecMoe | None) -> None:
        super().__init__(operands, out)
        o, same = operands, first if first is not None and _is_shared(first, operands) else None
        self.w13: torch.Tensor = same.w13 if same else _packed(o, "w13", pack_vec)
        self.w2: torch.Tensor = same.w2 if same else _packed(o, "w2", pack_vec)
        weights = (self.w13, self.w2, None, None, o.topk_weights, o.topk_ids)
        self.compute = VEC.bind(out, o.x, *weights, "silu", "vec")

    def call(self) -> None:
        self.compute()
