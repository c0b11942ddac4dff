"""hipBLASLt, which has no DeepSeek block scales: weights dequantised to bf16, then its bf16 product.

Its row-wise FP8 product is no row here. It would need both operands quantised anew with one scale per row.
In `core` the check calls that wrong, by 13 to 16 sigma of rounding where 2 are allowed, and what is wrong
gets no time. `with_quant`, where activations may be rounded to FP8, it passes (1.2 to 1.4 sigma of that), and
would be ranked with kernels that keep the weights as they are. How fast FP8 products are without block scales
is what the measured ceiling of fp8 says (`doctor`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.providers.torch_eager import Bf16Gemm
from kernels.op import Prepared, Unsupported
from kernels.platform import Platform
from kernels.vendor import Vendor

if TYPE_CHECKING:
    import torch


PREFERRED = Function("torch.backends.cuda.preferred_blas_library")


class HipblasLtDequantisedGemm(Vendor, Bf16Gemm):
    """`torch.bf16` with hipBLASLt whatever torch would have picked (hipBLAS on some sizes, versions and
    architectures): TORCH_BLAS_PREFER_HIPBLASLT in torch's aten/src/ATen/Context.h."""

    name = "hipblaslt.dequantised"
    library = "torch"
    requires = "torch for ROCm with hipBLASLt (read in 2.13)"
    runtime = "hipblaslt"
    kinds = ("rocm",)
    any_fp8 = True
    symbols = (PREFERRED,)

    def environment(self, platform: Platform) -> dict[str, str]:
        return {"TORCH_BLAS_PREFER_HIPBLASLT": "1"}

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        import torch

        picked = PREFERRED.bind()().name
        if out.device.type != "cpu" and picked != "Cublaslt":  # hipBLASLt's name in torch too
            raise Unsupported(f"torch {torch.__version__} does not take hipBLASLt here, but {picked}")
        return super().prepare(operands, out)
