"""vLLM's CPU kernels for MoE: the one for FP8, that it serves DeepSeek with on x86-64 servers, and those for
bf16, which take dequantised weights."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.binding import VendorFunction
from kernels.formats import BLOCK
from kernels.fp8_to_fp32 import fp8_to_bf16
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Prepared, Unsupported
from kernels.support import Support, need
from kernels.vendor import VllmCpu

if TYPE_CHECKING:
    import torch


class AmxMoe(VllmCpu):
    """`fused_experts_cpu` (SGLang's CPU kernel), called as CPUExpertsFp8 in vLLM's
    fused_moe/experts/cpu_moe.py calls it: bf16 activations, FP8 weights with block scales. Built on oneDNN's
    brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not."""

    name = "vllm.amx"
    requires = "vLLM's CPU build, AVX-512 (AMX tiles where the CPU has them)"
    kernel = "fused_experts_cpu"
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
        import torch

        kernel = self.bind()
        if not hasattr(torch.ops._C, "convert_weight_packed"):
            raise Unsupported("this vllm has no convert_weight_packed")
        return _AmxMoe(operands, out, kernel, first)


class _AmxMoe(Prepared):
    operands: FusedMoeOperands
    w13: torch.Tensor
    w2: torch.Tensor

    def __init__(
        self, operands: FusedMoeOperands, out: torch.Tensor, kernel: VendorFunction, first: _AmxMoe | None
    ) -> None:
        import torch
        from vllm._custom_ops import CPUQuantMethod

        super().__init__(operands, out)
        self.kernel, self.method = kernel, CPUQuantMethod.FP8_W8A16
        same = first if first is not None and first.operands.w13 is operands.w13 else None
        pack = torch.ops._C.convert_weight_packed
        self.w13 = same.w13 if same else pack(operands.w13)
        self.w2 = same.w2 if same else pack(operands.w2)

    def call(self) -> None:
        o = self.operands
        self.kernel(
            self.out,
            o.x,
            self.w13,
            self.w2,
            o.topk_weights,
            o.topk_ids,
            self.method,
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
    kernel = "fused_experts_cpu"
    onednn_isa = "AVX512_CORE_BF16"

    def prepare_turn(
        self, first: _BrgemmMoe | None, operands: FusedMoeOperands, out: torch.Tensor
    ) -> Prepared:
        return _BrgemmMoe(operands, out, self.bind(), self.bind("convert_weight_packed"), first)


class VecMoe(DequantisedMoe):
    """`cpu_fused_moe`, vLLM's own grouped product, in its AVX-512 variant: CPUUnquantizedExperts."""

    name = "vllm.vec"
    requires = "vLLM's CPU build, AVX-512"
    kernel = "cpu_fused_moe"

    def prepare_turn(self, first: _VecMoe | None, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        self.bind()
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
    w13: torch.Tensor
    w2: torch.Tensor

    def __init__(
        self,
        operands: FusedMoeOperands,
        out: torch.Tensor,
        kernel: VendorFunction,
        pack: VendorFunction,
        first: _BrgemmMoe | None,
    ) -> None:
        from vllm._custom_ops import CPUQuantMethod

        super().__init__(operands, out)
        self.kernel, self.method = kernel, CPUQuantMethod.UNQUANT
        shared = first if _is_shared(first, operands) else None
        self.w13 = shared.w13 if shared else _packed(operands, "w13", pack)
        self.w2 = shared.w2 if shared else _packed(operands, "w2", pack)

    def call(self) -> None:
        o, no_scales_biases_or_limits = self.operands, (None,) * 10
        weights = (self.w13, self.w2, o.topk_weights, o.topk_ids)
        self.kernel(self.out, o.x, *weights, self.method, *no_scales_biases_or_limits, True)


class _VecMoe(Prepared):
    operands: FusedMoeOperands
    w13: torch.Tensor
    w2: torch.Tensor

    def __init__(self, operands: FusedMoeOperands, out: torch.Tensor, first: _VecMoe | None) -> None:
        from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

        super().__init__(operands, out)
        self.kernel = cpu_fused_moe
        same = first if _is_shared(first, operands) else None
        pack = functools.partial(cpu_prepack_moe_weight, isa="vec")
        self.w13 = same.w13 if same else _packed(operands, "w13", pack)
        self.w2 = same.w2 if same else _packed(operands, "w2", pack)

    def call(self) -> None:
        o = self.operands
        weights = (self.w13, self.w2, None, None, o.topk_weights, o.topk_ids)
        self.kernel(self.out, o.x, *weights, "silu", "vec", False)
