"""DeepGEMM's FP8 product, DeepSeek's own: MN-major scales aligned for TMA on sm_90, packed UE8M0 on sm_100.

Read in DeepGEMM 1.0.0 (deep_gemm/jit_kernels/gemm.py), 2.1.0 and 2.6.1 (csrc/apis/gemm.hpp,
csrc/apis/layout.hpp, csrc/utils/layout.hpp, csrc/jit_kernels/impls/smxx_layout.hpp), and sgl-deep-gemm 0.2.5
(deep_gemm/__init__.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kernels import platform as platforms
from kernels import vendor
from kernels.binding import Function, first_of
from kernels.block_scale_gemm.layouts import column_major, rounded_up
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import native_scales
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch

TMA_ROWS = 4  # fp32 or int32 in 16 bytes (get_tma_aligned_size)
RECIPE = (1, 128, 128)  # rows of M and of N, and columns of K, that share a scale

MULTIPLY = Function("deep_gemm.fp8_gemm_nt", needs="a b d")
MULTIPLY_1 = Function("deep_gemm.gemm_fp8_fp8_bf16_nt", needs="lhs rhs out")  # before 2.0
TRANSFORM = Function(
    "deep_gemm.transform_sf_into_required_layout", needs="sf mn k recipe is_sfa", when="sm_100"
)


class DeepGemmBlockScale(vendor.DeepGemm):
    """Live scales lie in the kernel's layout before timing, as an engine's quantiser writes them. On sm_100
    the suite's own quantiser, which writes fp32, is followed by DeepGEMM's packing inside the timed call."""

    name = "deepgemm"
    requires = (
        "DeepGEMM 1.0 to 2.6.1 or sgl-deep-gemm to 0.2.5, with nvcc or NVRTC; "
        "sm_90, or from 2.1 sm_100 and sm_103 with power-of-two scales"
    )

    symbols = ((MULTIPLY, MULTIPLY_1), TRANSFORM)

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return Support.all_of(
            need(sizes.n % 64 == 0, "needs n to be a multiple of 64"),
            need(sizes.k % 128 == 0, "needs k to be a multiple of 128"),
        )

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        """An upper bound: on sm_100 packed scales of every row of b."""
        return 4 * sizes.n_blocks * 128 * rounded_up(sizes.k_blocks, 4) // 4

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.quantised_bytes + 4 * rounded_up(sizes.m, TMA_ROWS) * (sizes.k_blocks + 3) * 2

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        is_packed = native_scales(platforms.of(out.device).arch) == "ue8m0"
        bound = _Packed if is_packed else _Aligned
        return bound(operands, out)


class _DeepGemm(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(
        self,
        operands: BlockScaleGemmOperands,
        out: torch.Tensor,
        a_scale: torch.Tensor,
        b_scale: torch.Tensor,
    ) -> None:
        super().__init__(operands, out)
        self.function = first_of(MULTIPLY, MULTIPLY_1)
        self.b_scale = b_scale
        self.take(a_scale)

    def take(self, a_scale: torch.Tensor) -> None:
        """Scales of a for the calls to come."""
        o = self.operands
        given = ((o.a_q, a_scale), (o.b_q, self.b_scale), self.out)
        self.multiply = self.function.bind(**dict(zip(self.function.needs, given, strict=True)))

    def call(self) -> None:
        self.multiply()


class _Aligned(_DeepGemm):
    """sm_90: fp32 scales of a column by column; those of b as they are."""

    def __init__(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> None:
        self.a_scale = aligned(operands.a_scale)
        super().__init__(operands, out, self.a_scale, operands.b_scale)

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {"a_q": self.operands.a_q, "a_scale": self.a_scale}


class _Packed(_DeepGemm):
    """sm_100: the exponents of four scales in an int32, which no view of fp32 scales is."""

    def __init__(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> None:
        self.a_packed = packed(operands.a_scale, operands.a_q, is_a=True)
        super().__init__(operands, out, self.a_packed, packed(operands.b_scale, operands.b_q, is_a=False))

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        """In place, for the graphs that were recorded."""
        self.operands.a_q.copy_(live["a_q"])
        self.a_packed.copy_(packed(live["a_scale"], live["a_q"], is_a=True))

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """For a producer kernel that writes in every call: from now on the call takes the fp32 scales that it
        wrote, and DeepGEMM packs those."""
        self.take(self.operands.a_scale)
        return super().inputs()


def aligned(a_scale: torch.Tensor) -> torch.Tensor:
    """[M, blocks] with strides (1, M rounded up to four): what get_mn_major_tma_aligned_tensor gives, and
    hands on as it is."""
    return column_major(a_scale, TMA_ROWS)


def packed(scale: torch.Tensor, of: torch.Tensor, is_a: bool) -> torch.Tensor:
    """The scales of a or b [rows, K], those of b for every row: int32 [rows, blocks of K / 4] with strides
    (1, rows rounded up to four)."""
    rows, k = of.shape
    return TRANSFORM.bind(sf=scale, mn=rows, k=k, recipe=RECIPE, is_sfa=is_a)()
