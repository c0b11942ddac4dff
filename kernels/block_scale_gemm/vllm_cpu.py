"""vLLM's CPU kernel for FP8 linear layers with block scales: the one it serves DeepSeek with on Xeons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.block_scale_gemm.problem import BlockScaleGemmOperands, Sizes
from kernels.formats import BLOCK
from kernels.op import Prepared, Support, need
from kernels.vllm_runtime import VllmCpu

if TYPE_CHECKING:
    import torch


class Amx(VllmCpu):
    """`fp8_scaled_mm_cpu` (SGLang's CPU kernel), of CPUFp8BlockScaledMMKernel: W8A16. Built on
    oneDNN's brgemm, which takes AMX tiles where the CPU has them, AVX-512 where not. The engine itself picks
    it only where there are AMX tiles (vllm/model_executor/kernels/linear/scaled_mm/cpu.py, vLLM 0.32)."""

    name = "vllm.amx"
    kernel = "fp8_scaled_mm_cpu"
    boundaries = ("with_quant",)
    allocates = True

    STEP = 32  # both of N and K in its packed layout

    def fits(self, sizes: Sizes) -> Support:
        return Support.all_of(
            need(sizes.fp8 == "e4m3fn", f"takes e4m3fn, not {sizes.fp8}"),
            need(
                sizes.n % self.STEP == 0 and sizes.k % self.STEP == 0,
                f"needs n and k to be multiples of {self.STEP}",
            ),
        )

    def layout(self, sizes: Sizes) -> int:
        return sizes.n * sizes.k

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        return _Amx(operands, self.bind(), self.bind("convert_weight_packed")(operands.b_q))


class _Amx(Prepared):
    def __init__(self, operands: BlockScaleGemmOperands, kernel, packed: torch.Tensor) -> None:
        super().__init__(operands)
        self.kernel = kernel
        self.packed = packed

    def call(self) -> None:
        import torch

        o = self.operands
        is_packed = True
        self.out = self.kernel(o.a, self.packed, o.b_scale, [BLOCK, BLOCK], None, torch.bfloat16, is_packed)
