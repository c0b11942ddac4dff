"""CUTLASS's block-scaled FP8 products, as vLLM and SGLang build them.

Sources: cutlass_scaled_mm of vLLM 0.33 (_custom_ops.py; csrc/libtorch_stable/quantization/w8a8/cutlass:
scaled_mm_entry.cu, c3x/scaled_mm_blockwise_sm{90,100,120}_fp8_dispatch.cuh), with how its
model_executor/kernels/linear/scaled_mm/cutlass.py calls it; kernels/ops/gemm/fp8_blockwise_gemm.py of SGLang
0.5.23, with how its srt/layers/quantization/fp8_utils.py calls it. Both read scales of a column by column,
those of b with their blocks of K together, whatever their strides say. Untested on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kernels import platform as platforms
from kernels.binding import Function
from kernels.block_scale_gemm.layouts import column_major, padded_rows, rounded_up
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import BLACKWELL, Sglang, Vendor, Vllm

if TYPE_CHECKING:
    import torch

ROWS = 4  # of which M must be a multiple on sm_90

OF_VLLM = Function("vllm._custom_ops.cutlass_scaled_mm", needs="a b scale_a scale_b out_dtype")
OF_SGLANG = Function(
    "sglang.kernels.ops.gemm.fp8_blockwise_gemm.fp8_blockwise_scaled_mm",
    needs="mat_a mat_b scales_a scales_b out_dtype",
)


class CutlassGemm(Vendor):
    """multiply: of the engine; its arguments are a, b, their scales and the output's dtype, in this order"""

    allocates = True
    kinds: ClassVar[tuple[str, ...]] = ("cuda",)
    multiply: ClassVar[Function]
    step_n: ClassVar[int]

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return Support.all_of(
            need(sizes.n % self.step_n == 0, f"needs n to be a multiple of {self.step_n}"),
            need(sizes.k % BLOCK == 0, f"needs k to be a multiple of {BLOCK}"),
        )

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        m = rounded_up(sizes.m, ROWS)
        return m * (sizes.k + 4 * sizes.k_blocks) + 2 * (m - sizes.m) * sizes.n

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        return _Cutlass(self, operands)


class CutlassOfVllm(CutlassGemm, Vllm):
    """What vLLM takes after FlashInfer and DeepGEMM. Where M is no multiple of four on sm_90, the call
    computes rows of zeros up to the next."""

    name = "vllm.cutlass"
    requires = "vLLM for CUDA (read at 0.33), CUDA 12.8 or later, sm_90 or later"
    runtime = Vllm.runtime
    archs = ("sm_90", *BLACKWELL, "sm_120")
    multiply = OF_VLLM
    step_n = 16
    symbols = (OF_VLLM,)


class CutlassOfSglang(CutlassGemm, Sglang):
    """SGLang's default on sm_120, compiled when it is first called."""

    name = "sglang.cutlass"
    requires = "SGLang 0.5.18 or later for CUDA (read at 0.5.23), nvcc, sm_120"
    since = "0.5.18"  # the first that was read to have it
    runtime = Sglang.runtime
    archs = ("sm_120",)
    multiply = OF_SGLANG
    step_n = BLOCK
    symbols = (OF_SGLANG,)


class _Cutlass(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(self, implementation: CutlassGemm, operands: BlockScaleGemmOperands) -> None:
        import torch

        super().__init__(operands)
        rows = ROWS if platforms.of(operands.b_q.device).arch == "sm_90" else 1
        self.a_q = padded_rows(operands.a_q, rows)
        self.a_scale = column_major(padded_rows(operands.a_scale, rows))
        given = (self.a_q, operands.b_q.t(), self.a_scale, operands.b_scale.t(), torch.bfloat16)
        names = implementation.multiply.needs
        self.multiply = implementation.multiply.bind(**dict(zip(names, given, strict=True)))

    def inputs(self) -> Mapping[str, torch.Tensor]:
        m = self.operands.m
        return {"a_q": self.a_q[:m], "a_scale": self.a_scale[:m]}

    def call(self) -> None:
        self.out = self.multiply()[: self.operands.m]
