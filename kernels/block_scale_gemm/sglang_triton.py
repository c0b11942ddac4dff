"""SGLang's Triton kernel for FP8 linear layers with block scales.

Read in SGLang (python/sglang/srt/layers/quantization/fp8_kernel.py at 008601f): the universal entry point may
take DeepGEMM instead, so this asks for the Triton one, and versions that lack it not to take DeepGEMM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import find
from kernels.block_scale_gemm.problem import BlockScaleGemmOperands, Sizes
from kernels.block_scale_gemm.vllm_triton import TritonProduct
from kernels.op import Prepared
from kernels.vendor import Sglang

if TYPE_CHECKING:
    import torch


class Triton(Sglang):
    name = "sglang.triton"
    requires = "SGLang with Triton, cuda or rocm (read at 008601f)"
    allocates = True

    def workspace(self, sizes: Sizes) -> int:
        return sizes.quantised_bytes

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        module = "sglang.srt.layers.quantization.fp8_kernel"
        return TritonProduct(
            operands, find(f"{module}.w8a8_block_fp8_matmul_triton", f"{module}.w8a8_block_fp8_matmul")
        )
