"""FlashInfer's FP8 products: TensorRT-LLM's DeepGEMM on Hopper; CUTLASS, TensorRT-LLM's generated kernels and
cuTile on Blackwell.

Read in FlashInfer 0.6.18, its tags from v0.2.8, and 0.7.2.post1: flashinfer/gemm/gemm_base.py, whose
supported_compute_capability says which devices each takes; csrc/fp8_blockscale_gemm_sm90_binding.cu and what
it calls, csrc/nv_internal/tensorrt_llm/deep_gemm/fp8_gemm.cuh; csrc/gemm_groupwise_sm100.cu and
trtllm_gemm_runner.cu; flashinfer/gemm/kernels/cutile/gemm_fp8_nt_groupwise_cutile.py. Hopper's ran
on an H200 (0.6.16); others are untested on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kernels import vendor
from kernels.binding import Function
from kernels.block_scale_gemm.layouts import column_major, padded_rows, rounded_up
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch

ROWS = 4  # of fp32 scales in 16 bytes: sm90's and CUTLASS's kernels read them in such pieces
TWO_SMS = 256  # rows from which an instruction over two SMs is the faster (gemm_fp8_nt_groupwise)
WORKSPACE = 32 << 20  # of gemm_fp8_nt_groupwise
TRTLLM_K = 256  # the least K that TensorRT-LLM's kernels take

SM90 = Function("flashinfer.gemm.fp8_blockscale_gemm_sm90", needs="input weight input_scale weight_scale out")
GROUPWISE = Function(
    "flashinfer.gemm.gemm_fp8_nt_groupwise",
    needs="a b a_scale b_scale scale_major_mode mma_sm scale_granularity_mnk out",
    wishes="backend",  # before 0.2.9 it was CUTLASS alone
)
NAMED_BACKEND = Function(
    "flashinfer.gemm.gemm_fp8_nt_groupwise",
    needs="a b a_scale b_scale scale_major_mode scale_granularity_mnk out backend",
)


class FlashInferGemm(vendor.FlashInfer):
    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return Support.all_of(
            need(sizes.k % BLOCK == 0, f"needs k to be a multiple of {BLOCK}"),
            need(sizes.n % 64 == 0, "needs n to be a multiple of 64"),
        )


class Sm90(FlashInferGemm):
    """Transposes the product below 32 rows. Given bf16 activations it quantises them itself, in a kernel of
    its own inside the call, to fp32 scales: so vLLM 0.33 calls it, below 32 tokens
    (model_executor/kernels/linear/scaled_mm/flashinfer.py). No engine gives it FP8, which `core` does."""

    name = "flashinfer.sm90"
    requires = "FlashInfer 0.6.0 or later (read to 0.7.2), CUDA 12.8 or later, sm_90"
    since = "0.6.0"
    boundaries = ("core", "with_quant")
    activations = "fp8"
    archs = ("sm_90",)
    symbols = (SM90,)

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
        a, scale = operands.a, None
        if operands.a is None:
            self.a_scale: torch.Tensor = aligned(operands.a_scale)
            a, scale = operands.a_q, self.a_scale.t()
        self.multiply = SM90.bind(
            input=a, input_scale=scale, weight=operands.b_q, weight_scale=operands.b_scale, out=out
        )

    def inputs(self) -> Mapping[str, torch.Tensor]:
        if self.operands.a is None:
            return {"a_q": self.operands.a_q, "a_scale": self.a_scale}
        return super().inputs()

    def call(self) -> None:
        self.multiply()


class Groupwise(FlashInferGemm):
    """Its CUTLASS kernel. Where M is no multiple of four, the call computes rows of zeros up to the next.
    Scales of both operands lie along M and N, the faster of the two ways
    (include/flashinfer/gemm/gemm_groupwise_sm100.cuh). SGLang 0.5.23 runs `flashinfer.trtllm` there, and this
    one with --fp8-gemm-backend flashinfer_cutlass."""

    name = "flashinfer.groupwise"
    requires = "FlashInfer 0.2.8 or later (read to 0.7.2), sm_100 or sm_103"
    since = "0.2.8"
    archs = vendor.BLACKWELL
    symbols = (GROUPWISE,)

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        return 4 * sizes.n_blocks * sizes.k_blocks

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        m = rounded_up(sizes.m, ROWS)
        return m * (sizes.k + 4 * sizes.k_blocks + 2 * sizes.n) + WORKSPACE

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        return _Groupwise(operands, out)


class _Groupwise(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> None:
        m = operands.m
        padded = padded_rows(out, ROWS)
        super().__init__(operands, padded[:m])
        self.a_q = padded_rows(operands.a_q, ROWS)
        self.a_scale = column_major(padded_rows(operands.a_scale, ROWS))
        self.multiply = GROUPWISE.bind(
            a=self.a_q,
            b=operands.b_q,
            a_scale=self.a_scale.t(),
            b_scale=along_n(operands.b_scale),
            scale_major_mode="MN",
            mma_sm=2 if len(padded) >= TWO_SMS else 1,
            scale_granularity_mnk=(1, BLOCK, BLOCK),
            out=padded,
            backend="cutlass",
        )

    def inputs(self) -> Mapping[str, torch.Tensor]:
        m = self.operands.m
        return {"a_q": self.a_q[:m], "a_scale": self.a_scale[:m]}

    def call(self) -> None:
        self.multiply()


class Trtllm(FlashInferGemm):
    """TensorRT-LLM's generated kernel, downloaded when it is first called. SGLang's product on B200 and B300
    without DeepGEMM (srt/layers/quantization/fp8_utils.py of 0.5.23,
    flashinfer_gemm_w8a8_block_fp8_linear_with_fallback), called as there: no row is added where M is no
    multiple of four."""

    name = "flashinfer.trtllm"
    requires = "FlashInfer 0.2.9 or later (read to 0.7.2), sm_100 or sm_103"
    since = "0.2.9"
    archs = vendor.BLACKWELL
    symbols = (NAMED_BACKEND,)

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return Support.all_of(
            super().fits(sizes), need(sizes.k >= TRTLLM_K, f"needs k to be {TRTLLM_K} at least")
        )

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return 4 * sizes.m * sizes.k_blocks + WORKSPACE

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        return _NamedBackend(operands, out, "trtllm", None, column_major(operands.a_scale))


class CuTile(FlashInferGemm):
    """NVIDIA's kernel in Python, which reads every layout as it is. It is tuned when it is first called at
    these sizes; every call fills the output with zeros first. No engine runs it."""

    name = "flashinfer.cutile"
    requires = (
        "FlashInfer 0.6.14 or later (read to 0.7.2) with cuda-tile and its compiler, sm_100, sm_103 or sm_120"
    )
    since = "0.6.14"
    archs = (*vendor.BLACKWELL, "sm_120")
    also: ClassVar = {"cuda.tile": "pip install 'cuda-tile[tileiras]'"}
    symbols = (NAMED_BACKEND,)

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return WORKSPACE

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        return _NamedBackend(operands, out, "cutile", "K", operands.a_scale)


class _NamedBackend(Prepared):
    """By a backend that takes b and its scales as they are."""

    operands: BlockScaleGemmOperands

    def __init__(
        self,
        operands: BlockScaleGemmOperands,
        out: torch.Tensor,
        backend: str,
        mode: str | None,
        a_scale: torch.Tensor,
    ) -> None:
        super().__init__(operands, out)
        self.a_scale = a_scale
        self.multiply = NAMED_BACKEND.bind(
            a=operands.a_q,
            b=operands.b_q,
            a_scale=a_scale,
            b_scale=operands.b_scale,
            scale_major_mode=mode,
            scale_granularity_mnk=(1, BLOCK, BLOCK),
            out=out,
            backend=backend,
        )

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {"a_q": self.operands.a_q, "a_scale": self.a_scale}

    def call(self) -> None:
        self.multiply()


def aligned(a_scale: torch.Tensor) -> torch.Tensor:
    """[M, blocks] with strides (1, M rounded up to four). The kernel takes that stride for granted."""
    return column_major(a_scale, ROWS)


def along_n(b_scale: torch.Tensor) -> torch.Tensor:
    """[blocks of K, blocks of N], contiguous."""
    return b_scale.t().contiguous()
