"""DeepGEMM's FP8 product, DeepSeek's own: MN-major scales aligned for TMA on sm_90, packed UE8M0 on
Blackwell. By itself, and as engines call it.

Read in DeepGEMM 1.0.0 (deep_gemm/jit_kernels/gemm.py), 2.1.0 and 2.6.1 (csrc/apis/gemm.hpp,
csrc/apis/layout.hpp, csrc/utils/layout.hpp, csrc/jit_kernels/impls/smxx_layout.hpp), sgl-deep-gemm 0.2.5
(deep_gemm/__init__.py) and 2.8.1, which vLLM 0.33 carries. vLLM: utils/deep_gemm.py,
model_executor/kernels/linear/scaled_mm/flashinfer.py and deep_gemm.py,
model_executor/layers/quantization/utils/fp8_utils.py, in 0.32 and 0.33. SGLang:
deepgemm_w8a8_block_fp8_linear_with_fallback in srt/layers/quantization/fp8_utils.py of 0.5.23, its quantiser
in 0.5.10, 0.5.18 and 0.5.23. `deepgemm` ran on an H100 and an H200 (0.1.4.post1); engines'
rows and Blackwell's are untested on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kernels import platform as platforms
from kernels import vendor
from kernels.binding import Function, Taken, first_of
from kernels.block_scale_gemm.layouts import column_major, rounded_up
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK, native_scales
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch

TMA_ROWS = 4  # fp32 or int32 in 16 bytes (get_tma_aligned_size)
RECIPE = (1, 128, 128)  # rows of M and of N, and columns of K, that share a scale

MULTIPLY = Function("deep_gemm.fp8_gemm_nt", needs="a b d")
MULTIPLY_1 = Function("deep_gemm.gemm_fp8_fp8_bf16_nt", needs="lhs rhs out")  # before 2.0
TRANSFORM = Function(
    "deep_gemm.transform_sf_into_required_layout",
    needs="sf mn k recipe is_sfa",
    when="sm_100 and later",
)

# vLLM's wrappers hand on what they are given to the deep_gemm package, or else to the one that vLLM carries.
VLLM = "vllm.utils.deep_gemm"
VLLM_MULTIPLY = Function(f"{VLLM}.fp8_gemm_nt", needs="a b d")
VLLM_TRANSFORM = Function(
    f"{VLLM}.transform_sf_into_required_layout",
    "deep_gemm.transform_sf_into_required_layout",
    needs="sf mn k recipe is_sfa",
    when="sm_100 and later",
)
VLLM_FP8 = "vllm.model_executor.layers.quantization.utils.fp8_utils"
VLLM_QUANTISE = Function(
    f"{VLLM_FP8}.per_token_group_quant_fp8",
    needs="x group_size column_major_scales use_ue8m0",
    when="with_quant, sm_90",
)
VLLM_QUANTISE_PACKED = Function(
    f"{VLLM_FP8}.per_token_group_quant_fp8_packed_for_deepgemm",
    needs="x group_size use_ue8m0",
    when="with_quant, sm_100 and later",
)

SGLANG_QUANTISE = Function(
    "sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_group_quant_fp8",
    "sglang.srt.layers.quantization.fp8_kernel.sglang_per_token_group_quant_fp8",
    needs="x group_size column_major_scales scale_tma_aligned scale_ue8m0",
    when="with_quant",
)


class DeepGemmBlockScale(vendor.DeepGemm):
    """Live scales lie in the kernel's layout before timing, as an engine's quantiser writes them. On
    Blackwell the suite's own quantiser, which writes fp32, is followed by DeepGEMM's packing inside the timed
    call. What SGLang runs on sm_90, but for its quantiser; `deepgemm@sglang` and `deepgemm@vllm` have those
    of the engines.

    multiply:  its forms, of which the first that exists is called
    transform: brings scales into the kernel's layout
    """

    name = "deepgemm"
    requires = (
        "DeepGEMM 1.0 or later (read to 2.6.1) or sgl-deep-gemm (read to 0.2.5), with nvcc or NVRTC; "
        "sm_90, or from 2.1 sm_100 and sm_103 with power-of-two scales"
    )
    multiply: ClassVar[tuple[Function, ...]] = (MULTIPLY, MULTIPLY_1)
    transform: ClassVar[Function] = TRANSFORM
    symbols: ClassVar[Sequence[Taken]] = ((MULTIPLY, MULTIPLY_1), TRANSFORM)

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return Support.all_of(
            need(sizes.n % 64 == 0, "needs n to be a multiple of 64"),
            need(sizes.k % 128 == 0, "needs k to be a multiple of 128"),
        )

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        """An upper bound: on Blackwell packed scales of every row of b."""
        return 4 * sizes.n_blocks * 128 * rounded_up(sizes.k_blocks, 4) // 4

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return 4 * rounded_up(sizes.m, TMA_ROWS) * (sizes.k_blocks + 3) * 2

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        bound = _Packed if packs(out.device) else _Aligned
        return bound(self, operands, out)

    def bind(self, a: object, b: object, out: torch.Tensor) -> Callable[..., Any]:
        """a, b: FP8 and its scales in the kernel's layout."""
        function: Function = first_of(*self.multiply)
        return function.bind(**dict(zip(function.needs, (a, b, out), strict=True)))

    def packed(self, scale: torch.Tensor, of: torch.Tensor, is_a: bool) -> torch.Tensor:
        """The scales of a or b [rows, K], those of b for every row: int32 [rows, blocks of K / 4] with
        strides (1, rows rounded up to four)."""
        rows, k = of.shape
        result: torch.Tensor = self.transform.bind(sf=scale, mn=rows, k=k, recipe=RECIPE, is_sfa=is_a)()
        return result

    def weights(self, operands: BlockScaleGemmOperands) -> tuple[torch.Tensor, torch.Tensor]:
        """b and its scales in the kernel's layout."""
        b_q, scale = operands.b_q, operands.b_scale
        return b_q, self.packed(scale, b_q, is_a=False) if packs(b_q.device) else scale


class DeepGemmOfEngine(DeepGemmBlockScale):
    """With the engine's own quantiser, which writes scales as the kernel takes them. Engines round weights to
    scales of powers of two as they load, where the kernel wants that; the operands have such scales."""

    boundaries = ("core", "with_quant")
    activations = "fp8"

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        if operands.a is None:
            return super().prepare(operands, out)
        return _Quantising(self, operands, out)

    def quantiser(self, a: torch.Tensor) -> Callable[[], Any]:
        """A call that gives a in FP8 and its scales in the kernel's layout."""
        raise NotImplementedError


class DeepGemmOfVllm(DeepGemmOfEngine, vendor.Vllm):
    """vLLM's default from sm_90 on; on sm_90 from 32 tokens, below which it is `flashinfer.sm90`. It rounds
    scales of activations up to powers of two on sm_90 too (VLLM_USE_DEEP_GEMM_E8M0), and there does not align
    them: where M is no multiple of four, DeepGEMM does within the call."""

    name = "deepgemm@vllm"
    requires = "vLLM for CUDA (read at 0.33), sm_90 or, with power-of-two scales, sm_100, sm_103 or sm_120"
    library = "vllm"
    runtime = vendor.Vllm.runtime
    install = vendor.Vllm.install
    kinds = ("cuda",)
    archs = ("sm_90", *vendor.BLACKWELL, "sm_120")
    multiply = (VLLM_MULTIPLY,)
    transform = VLLM_TRANSFORM
    symbols = (VLLM_MULTIPLY, VLLM_TRANSFORM, VLLM_QUANTISE, VLLM_QUANTISE_PACKED)

    def quantiser(self, a: torch.Tensor) -> Callable[[], Any]:
        if packs(a.device):
            return VLLM_QUANTISE_PACKED.bind(x=a, group_size=BLOCK, use_ue8m0=True)
        return VLLM_QUANTISE.bind(x=a, group_size=BLOCK, column_major_scales=True, use_ue8m0=True)


class DeepGemmOfSglang(DeepGemmOfEngine):
    """SGLang's default on sm_90, sm_100 and sm_103, with the deep_gemm package."""

    name = "deepgemm@sglang"
    requires = (
        "SGLang with sgl-deep-gemm (read at 0.5.23), sm_90, or sm_100 and sm_103 with power-of-two scales"
    )
    also: ClassVar = {"sglang": vendor.Sglang.install}
    multiply = (MULTIPLY,)
    symbols = (MULTIPLY, TRANSFORM, SGLANG_QUANTISE)

    def quantiser(self, a: torch.Tensor) -> Callable[[], Any]:
        return SGLANG_QUANTISE.bind(
            x=a,
            group_size=BLOCK,
            column_major_scales=True,
            scale_tma_aligned=True,
            scale_ue8m0=packs(a.device),
        )


class _DeepGemm(Prepared):
    operands: BlockScaleGemmOperands

    def __init__(
        self,
        implementation: DeepGemmBlockScale,
        operands: BlockScaleGemmOperands,
        out: torch.Tensor,
        a_scale: torch.Tensor,
    ) -> None:
        super().__init__(operands, out)
        self.implementation = implementation
        self.b = implementation.weights(operands)
        self.take(a_scale)

    def take(self, a_scale: torch.Tensor) -> None:
        """Scales of a for the calls to come."""
        self.multiply = self.implementation.bind((self.operands.a_q, a_scale), self.b, self.out)

    def call(self) -> None:
        self.multiply()


class _Aligned(_DeepGemm):
    """sm_90: fp32 scales of a column by column; those of b as they are."""

    def __init__(
        self, implementation: DeepGemmBlockScale, operands: BlockScaleGemmOperands, out: torch.Tensor
    ) -> None:
        self.a_scale = aligned(operands.a_scale)
        super().__init__(implementation, operands, out, self.a_scale)

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {"a_q": self.operands.a_q, "a_scale": self.a_scale}


class _Packed(_DeepGemm):
    """Blackwell: the exponents of four scales in an int32, which no view of fp32 scales is."""

    def __init__(
        self, implementation: DeepGemmBlockScale, operands: BlockScaleGemmOperands, out: torch.Tensor
    ) -> None:
        self.a_packed = implementation.packed(operands.a_scale, operands.a_q, is_a=True)
        super().__init__(implementation, operands, out, self.a_packed)

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        """In place, for the graphs that were recorded."""
        self.operands.a_q.copy_(live["a_q"])
        self.a_packed.copy_(self.implementation.packed(live["a_scale"], live["a_q"], is_a=True))

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """For a producer kernel that writes in every call: from now on the call takes the fp32 scales that it
        wrote, and DeepGEMM packs those."""
        self.take(self.operands.a_scale)
        return super().inputs()

    def reads(self) -> Mapping[str, torch.Tensor]:
        return {"a_q": self.operands.a_q}


class _Quantising(Prepared):
    """A call of the engine's quantiser, then of the kernel on what that made anew."""

    operands: BlockScaleGemmOperands

    def __init__(
        self, implementation: DeepGemmOfEngine, operands: BlockScaleGemmOperands, out: torch.Tensor
    ) -> None:
        super().__init__(operands, out)
        self.quantise = implementation.quantiser(operands.a)
        self.multiply = implementation.bind(self.quantise(), implementation.weights(operands), out)

    def call(self) -> None:
        self.multiply(a=self.quantise())


def packs(device: torch.device) -> bool:
    """Whether the kernel takes packed scales there."""
    return native_scales(platforms.of(device).arch) == "ue8m0"


def aligned(a_scale: torch.Tensor) -> torch.Tensor:
    """[M, blocks] with strides (1, M rounded up to four): what get_mn_major_tma_aligned_tensor gives, and
    hands on as it is."""
    return column_major(a_scale, TMA_ROWS)
