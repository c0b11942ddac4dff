"""DeepGEMM's FP8 product, DeepSeek's own, by itself and as engines call it. Scales are MN-major and aligned
for TMA on sm_90, and packed UE8M0 on Blackwell.

Read in DeepGEMM 1.0.0 (deep_gemm/jit_kernels/gemm.py), 2.1.0 and 2.6.1 (csrc/apis/gemm.hpp,
csrc/apis/layout.hpp, csrc/utils/layout.hpp, csrc/jit_kernels/impls/smxx_layout.hpp), sgl-deep-gemm 0.2.5
(deep_gemm/__init__.py) and 2.8.1, which vLLM 0.33 carries. vLLM: utils/deep_gemm.py,
model_executor/kernels/linear/scaled_mm/flashinfer.py and deep_gemm.py,
model_executor/layers/quantization/utils/fp8_utils.py, in 0.32 and 0.33. SGLang:
deepgemm_w8a8_block_fp8_linear_with_fallback in srt/layers/quantization/fp8_utils.py of 0.5.23, and its
quantiser in 0.5.10, 0.5.18 and 0.5.23. `deepgemm` ran on an H100 and an H200 with sgl-deep-gemm 0.1.4.post1.
The engines' rows and everything on Blackwell are untested on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from kernels import platform as platforms
from kernels import vendor
from kernels.binding import Function, Used, first_of
from kernels.block_scale_gemm.layouts import column_major, multiples, prepared, rounded_up
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes
from kernels.formats import BLOCK, native_scales
from kernels.lazy import torch
from kernels.op import Prepared
from kernels.support import Support

TMA_ROWS = 4  # fp32 or int32 in 16 bytes (get_tma_aligned_size)
RECIPE = (1, 128, 128)  # how many rows of M, rows of N and columns of K share a scale

MULTIPLY = Function("deep_gemm.fp8_gemm_nt", needs="a b d")
MULTIPLY_1 = Function("deep_gemm.gemm_fp8_fp8_bf16_nt", needs="lhs rhs out")  # before 2.0
TRANSFORM = Function(
    "deep_gemm.transform_sf_into_required_layout", needs="sf mn k recipe is_sfa", when="sm_100 and later"
)

# vLLM's wrappers pass their arguments on to the deep_gemm package, or else to the one that vLLM carries.
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
    """The scales of a are brought into the kernel's layout before timing, as an engine's quantiser writes
    them. Where the suite's own quantiser precedes the call on Blackwell, it writes scales in fp32, which
    DeepGEMM packs within the call (see _Packed)."""

    name = "deepgemm"
    requires = (
        "DeepGEMM 1.0 or later (read to 2.6.1) or sgl-deep-gemm (read to 0.2.5), with nvcc or NVRTC; "
        "sm_90, or from 2.1 sm_100 and sm_103 with power-of-two scales"
    )
    # The product: the first of these functions that the installed version has.
    multiply: ClassVar[tuple[Function, ...]] = (MULTIPLY, MULTIPLY_1)
    transform: ClassVar[Function] = TRANSFORM  # brings scales into the kernel's layout
    symbols: ClassVar[Sequence[Used]] = ((MULTIPLY, MULTIPLY_1), TRANSFORM)

    def fits(self, sizes: BlockScaleGemmSizes) -> Support:
        return multiples(sizes, 64)

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        """An upper bound: packed scales for every row of b, as Blackwell has them, a byte for each scale."""
        return sizes.n_blocks * BLOCK * rounded_up(sizes.k_blocks, 4)

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        """An upper bound: two copies of the scales of a in fp32. Packed scales take no more bytes."""
        return 2 * 4 * rounded_up(sizes.m, TMA_ROWS) * sizes.k_blocks

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        if operands.a is not None:
            # The quantiser returns new tensors at every call. They replace those that `multiply` is bound to.
            quantise = self.quantiser(operands.a)
            multiply = self.bind(quantise(), self.weights(operands), out)
            return Prepared(operands, out, lambda: multiply(a=quantise()))
        if packs(out.device):
            return _Packed(self, operands, out)
        # The layout that DeepGEMM's get_mn_major_tma_aligned_tensor would make, so that it copies nothing.
        a_scale = column_major(operands.a_scale, TMA_ROWS)
        multiply = self.bind((operands.a_q, a_scale), self.weights(operands), out)
        return prepared(operands, out, multiply, a_scale=a_scale)

    def bind(self, a: object, b: object, out: torch.Tensor) -> Callable[..., Any]:
        """The call that writes the product to `out`. a, b: FP8 values, and scales in the kernel's layout"""
        function: Function = first_of(*self.multiply)
        return function.bind(**dict(zip(function.needs, (a, b, out), strict=True)))

    def packed(self, scale: torch.Tensor, values: torch.Tensor, is_a: bool) -> torch.Tensor:
        """The scales of a or of b, packed for every row of their values FP8 [rows, K]: int32 [rows, blocks of
        K / 4] with strides (1, rows rounded up to four)."""
        rows, k = values.shape
        result: torch.Tensor = self.transform.bind(sf=scale, mn=rows, k=k, recipe=RECIPE, is_sfa=is_a)()
        return result

    def weights(self, operands: BlockScaleGemmOperands) -> tuple[torch.Tensor, torch.Tensor]:
        """b, and its scales in the kernel's layout."""
        b_q, scale = operands.b_q, operands.b_scale
        if packs(b_q.device):
            scale = self.packed(scale, b_q, is_a=False)
        return b_q, scale

    def quantiser(self, a: torch.Tensor) -> Callable[[], Any]:
        """A call that returns a in FP8, with its scales in the kernel's layout."""
        raise NotImplementedError


class DeepGemmOfVllm(DeepGemmBlockScale, vendor.Vllm):
    """The engine's quantiser writes the scales as the kernel takes them. It rounds the scales of activations
    up to powers of two on sm_90 too (VLLM_USE_DEEP_GEMM_E8M0) and does not align them there: where M is not a
    multiple of four, DeepGEMM aligns them within the call. Where the kernel requires powers of two, engines
    round the scales of weights to them as they load; the operands have such scales."""

    name = "deepgemm@vllm"
    requires = "vLLM for CUDA (read at 0.33), sm_90 or, with power-of-two scales, sm_100, sm_103 or sm_120"
    library = "vllm"
    runtime = vendor.Vllm.runtime
    kinds = ("cuda",)
    archs = ("sm_90", *vendor.BLACKWELL, "sm_120")
    boundaries = ("core", "with_quant")
    activations = "fp8"
    multiply = (VLLM_MULTIPLY,)
    transform = VLLM_TRANSFORM
    symbols = (VLLM_MULTIPLY, VLLM_TRANSFORM, VLLM_QUANTISE, VLLM_QUANTISE_PACKED)

    def quantiser(self, a: torch.Tensor) -> Callable[[], Any]:
        if packs(a.device):
            return VLLM_QUANTISE_PACKED.bind(x=a, group_size=BLOCK, use_ue8m0=True)
        return VLLM_QUANTISE.bind(x=a, group_size=BLOCK, column_major_scales=True, use_ue8m0=True)


class DeepGemmOfSglang(DeepGemmBlockScale):
    """Like `deepgemm@vllm`, but it calls deep_gemm itself, and its quantiser aligns scales on sm_90 too."""

    name = "deepgemm@sglang"
    requires = (
        "SGLang with sgl-deep-gemm (read at 0.5.23), sm_90, or sm_100 and sm_103 with power-of-two scales"
    )
    also = ("sglang",)
    boundaries = ("core", "with_quant")
    activations = "fp8"
    multiply = (MULTIPLY,)
    symbols = (MULTIPLY, TRANSFORM, SGLANG_QUANTISE)

    def quantiser(self, a: torch.Tensor) -> Callable[[], Any]:
        layout = {"column_major_scales": True, "scale_tma_aligned": True, "scale_ue8m0": packs(a.device)}
        return SGLANG_QUANTISE.bind(x=a, group_size=BLOCK, **layout)


class _Packed(Prepared):
    """The call on Blackwell. DeepGEMM takes the scales of a packed, four exponents in an int32, or in fp32,
    which it packs within the call. Until `inputs` is called, they are packed, and only `load` writes them."""

    operands: BlockScaleGemmOperands

    def __init__(self, row: DeepGemmBlockScale, operands: BlockScaleGemmOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out, lambda: self.multiply())
        self.a_packed = row.packed(operands.a_scale, operands.a_q, is_a=True)
        self.row, self.b = row, row.weights(operands)
        self.multiply = row.bind((operands.a_q, self.a_packed), self.b, out)

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        """Writes in place, because recorded graphs read from there."""
        self.operands.a_q.copy_(live["a_q"])
        self.a_packed.copy_(self.row.packed(live["a_scale"], live["a_q"], is_a=True))

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """Changes the call: from now on it takes the fp32 scales of the operands. A caller asks for `inputs`
        in order to write them before every call, and the suite's own quantiser cannot write packed scales."""
        self.multiply = self.row.bind((self.operands.a_q, self.operands.a_scale), self.b, self.out)
        return super().inputs()

    def reads(self) -> Mapping[str, torch.Tensor]:
        return {"a_q": self.operands.a_q}


def packs(device: torch.device) -> bool:
    """Whether the kernel takes packed scales on this device."""
    return native_scales(platforms.of(device).arch) == "ue8m0"
