"""vLLM's CPU kernel for FP8 MoE: what it serves DeepSeek with on x86-64 servers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kernels.formats import BLOCK
from kernels.fused_moe.problem import FusedMoeOperands, Sizes
from kernels.op import Prepared, Support, Unsupported, need
from kernels.vllm_runtime import VllmCpu

if TYPE_CHECKING:
    import torch


class Amx(VllmCpu):
    """`fused_experts_cpu` (SGLang's CPU kernel), called as CPUExpertsFp8 in vLLM's
    fused_moe/experts/cpu_moe.py calls it: bf16 activations, FP8 weights with block scales. Built on oneDNN's
    brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not."""

    name = "vllm.amx"
    requires = "vLLM's CPU build, AVX-512 (AMX tiles where the CPU has them)"
    kernel = "fused_experts_cpu"
    boundaries = ("with_quant",)

    def fits(self, sizes: Sizes) -> Support:
        return Support.all_of(
            need(sizes.fp8 == "e4m3fn", f"takes e4m3fn, not {sizes.fp8}"),
            need(sizes.ep == 1, "counts every id, and an id of -1 outside its table: needs ep=1"),
        )

    def layout(self, sizes: Sizes) -> int:
        return sizes.held * 3 * sizes.hidden * sizes.inter

    def workspace(self, sizes: Sizes) -> int:
        """Its caches: gate and up, h, what experts give; per thread 32 rows of x and unpacked weights."""
        pairs = sizes.tokens * sizes.picks
        per_thread = (32 + 32 * 32) * max(sizes.hidden, sizes.inter) * 2
        return pairs * (3 * sizes.inter + sizes.hidden) * 2 + (os.cpu_count() or 1) * per_thread

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def prepare_turn(self, first: _Amx | None, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        import torch

        kernel = self.bind()
        if not hasattr(torch.ops._C, "convert_weight_packed"):
            raise Unsupported("this vllm has no convert_weight_packed")
        return _Amx(operands, out, kernel, first)


class _Amx(Prepared):
    def __init__(self, operands: FusedMoeOperands, out: torch.Tensor, kernel, first: _Amx | None) -> None:
        import torch
        from vllm._custom_ops import CPUQuantMethod

        super().__init__(operands, out)
        self.kernel, self.method = kernel, CPUQuantMethod.FP8_W8A16
        shared = first is not None and first.operands.w13 is operands.w13
        pack = torch.ops._C.convert_weight_packed
        self.w13 = first.w13 if shared else pack(operands.w13)
        self.w2 = first.w2 if shared else pack(operands.w2)

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
