"""FlashInfer's FP8 products: TensorRT-LLM's DeepGEMM on Hopper, CUTLASS on Blackwell.

Read in FlashInfer 0.6.18: flashinfer/gemm/gemm_base.py; csrc/fp8_blockscale_gemm_sm90_binding.cu and what it
calls, csrc/nv_internal/tensorrt_llm/deep_gemm/fp8_gemm.cuh; csrc/gemm_groupwise_sm100.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kernels import vendor
from kernels.binding import find, keywords
from kernels.block_scale_gemm.layouts import column_major, padded_rows, rounded_up
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch

ROWS = 4  # of fp32 scales in 16 bytes: both kernels read them in such pieces
TWO_SMS = 256  # rows from which an instruction over two SMs is the faster (gemm_fp8_nt_groupwise)
WORKSPACE = 32 << 20  # of gemm_fp8_nt_groupwise


class FlashInferGemm(vendor.FlashInfer):
    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return Support.all_of(
            need(sizes.k % BLOCK == 0, f"needs k to be a multiple of {BLOCK}"),
            need(sizes.n % 64 == 0, "needs n to be a multiple of 64"),
        )


class Sm90(FlashInferGemm):
    """Transposes the product below 32 rows. Given bf16 activations it quantises them itself, in a kernel of
    its own inside the call, to fp32 scales."""

    name = "flashinfer.sm90"
    requires = "FlashInfer 0.6.0 to 0.6.18, CUDA 12.8 or later, sm_90"
    boundaries = ("core", "with_quant")
    activations = "fp8"
    archs = ("sm_90",)

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        """Every call asks for what quantising both operands would take, even where none is."""
        m = rounded_up(sizes.m, ROWS)
        blocks = 4 * sizes.k_blocks * (m + sizes.n_blocks)
        return (m + sizes.n) * sizes.k + blocks + 4 * m * sizes.k_blocks

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        return _Sm90(operands, out)


class _Sm90(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        self.multiply = find("flashinfer.gemm.fp8_blockscale_gemm_sm90")
        given = {"input": operands.a, "input_scale": None}
        if operands.a is None:
            self.a_scale: torch.Tensor = aligned(operands.a_scale)
            given = {"input": operands.a_q, "input_scale": self.a_scale.t()}
        weight = {"weight": operands.b_q, "weight_scale": operands.b_scale}
        self.arguments = keywords(self.multiply, given | weight | {"out": out})

    def inputs(self) -> Mapping[str, torch.Tensor]:
        if self.operands.a is None:
            return {"a_q": self.operands.a_q, "a_scale": self.a_scale}
        return super().inputs()

    def call(self) -> None:
        self.multiply(**self.arguments)


class Groupwise(FlashInferGemm):
    """Where M is no multiple of four, the call computes rows of zeros up to the next. Scales of both operands
    lie along M and N, the faster of the two ways (include/flashinfer/gemm/gemm_groupwise_sm100.cuh)."""

    name = "flashinfer.groupwise"
    requires = "FlashInfer 0.2.8 to 0.6.18, sm_100"
    archs = ("sm_100",)

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        return 4 * sizes.n_blocks * sizes.k_blocks

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        m = rounded_up(sizes.m, ROWS)
        return sizes.quantised_bytes + m * (sizes.k + 4 * sizes.k_blocks + 2 * sizes.n) + WORKSPACE

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        return _Groupwise(operands, out)


class _Groupwise(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> None:
        m = operands.m
        padded = padded_rows(out, ROWS)
        super().__init__(operands, padded[:m])
        self.multiply = find("flashinfer.gemm.gemm_fp8_nt_groupwise")
        self.a_q = padded_rows(operands.a_q, ROWS)
        self.a_scale = column_major(padded_rows(operands.a_scale, ROWS))
        self.arguments = keywords(
            self.multiply,
            {
                "a": self.a_q,
                "b": operands.b_q,
                "a_scale": self.a_scale.t(),
                "b_scale": along_n(operands.b_scale),
                "scale_major_mode": "MN",
                "mma_sm": 2 if len(padded) >= TWO_SMS else 1,
                "scale_granularity_mnk": (1, BLOCK, BLOCK),
                "out": padded,
            },
            {"backend": "cutlass"},
        )

    def inputs(self) -> Mapping[str, torch.Tensor]:
        m = self.operands.m
        return {"a_q": self.a_q[:m], "a_scale": self.a_scale[:m]}

    def call(self) -> None:
        self.multiply(**self.arguments)


def aligned(a_scale: torch.Tensor) -> torch.Tensor:
    """[M, blocks] with strides (1, M rounded up to four). The kernel takes that stride for granted."""
    return column_major(a_scale, ROWS)


def along_n(b_scale: torch.Tensor) -> torch.Tensor:
    """[blocks of K, blocks of N], contiguous."""
    return b_scale.t().contiguous()
