"""CUTLASS's FP8 products with block scales, as vLLM and SGLang build them.

Sources: cutlass_scaled_mm of vLLM 0.33 (_custom_ops.py; csrc/libtorch_stable/quantization/w8a8/cutlass:
scaled_mm_entry.cu, c3x/scaled_mm_blockwise_sm{90,100,120}_fp8_dispatch.cuh) and its caller
model_executor/kernels/linear/scaled_mm/cutlass.py; kernels/ops/gemm/fp8_blockwise_gemm.py of SGLang 0.5.23
and its caller srt/layers/quantization/fp8_utils.py. Whatever the strides say, both kernels read the scales of
a column by column, and the scales of b with the blocks of K next to each other. Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kernels import platform as platforms
from kernels.binding import Function
from kernels.block_scale_gemm.layouts import column_major, multiples, padded_rows, padding_bytes, product
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.op import Prepared
from kernels.support import Support
from kernels.vendor import BLACKWELL, Sglang, Vendor, Vllm

if TYPE_CHECKING:
    import torch

ROWS = 4  # on sm_90, M must be a multiple of this

OF_VLLM = Function("vllm._custom_ops.cutlass_scaled_mm", needs="a b scale_a scale_b out_dtype")
OF_SGLANG = Function(
    "sglang.kernels.ops.gemm.fp8_blockwise_gemm.fp8_blockwise_scaled_mm",
    needs="mat_a mat_b scales_a scales_b out_dtype",
)


class CutlassGemm(Vendor):
    allocates = True
    kinds: ClassVar[tuple[str, ...]] = ("cuda",)
    multiply: ClassVar[Function]  # its arguments are a, b, their scales and the output's dtype, in this order
    step_n: ClassVar[int]  # N must be a multiple of this

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return multiples(sizes, self.step_n, BLOCK)

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return padding_bytes(sizes, ROWS)

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        import torch

        rows = ROWS if platforms.of(operands.b_q.device).arch == "sm_90" else 1
        a_q = padded_rows(operands.a_q, rows)
        a_scale = column_major(padded_rows(operands.a_scale, rows))
        given = (a_q, operands.b_q.t(), a_scale, operands.b_scale.t(), torch.bfloat16)
        multiply = self.multiply.bind(**dict(zip(self.multiply.needs, given, strict=True)))
        return product(operands, None, multiply, a_q, a_scale)


class CutlassOfVllm(CutlassGemm, Vllm):
    """What vLLM takes after FlashInfer and DeepGEMM. Where M is not a multiple of four on sm_90, the call
    also computes the rows of zeros up to the next multiple."""

    name = "vllm.cutlass"
    requires = "vLLM for CUDA (read at 0.33), CUDA 12.8 or later, sm_90 or later"
    runtime = Vllm.runtime
    archs = ("sm_90", *BLACKWELL, "sm_120")
    multiply = OF_VLLM
    step_n = 16
    symbols = (OF_VLLM,)


class CutlassOfSglang(CutlassGemm, Sglang):
    """SGLang's default on sm_120. It is compiled at the first call."""

    name = "sglang.cutlass"
    requires = "SGLang 0.5.18 or later for CUDA (read at 0.5.23), nvcc, sm_120"
    since = "0.5.18"  # the first that was read to have it
    runtime = Sglang.runtime
    archs = ("sm_120",)
    multiply = OF_SGLANG
    step_n = BLOCK
    symbols = (OF_SGLANG,)
