"""FlashAttention 2, 3 and 4, each a package of its own; 3 and 4 within both engines too.

Read at 2026-08: flash_attn/flash_attn_interface.py (2.8.3), hopper/flash_attn_interface.py and
hopper/flash_api.cpp (3.0.0), flash_attn/cute/interface.py (4.0.0b36); vllm_flash_attn/flash_attn_interface.py
of vLLM 0.33, with how its v1/attention/backends/mla/prefill/flash_attn.py calls it; sgl_kernel/flash_attn.py
of sglang-kernel 0.4.10. All align the causal mask to the last key. Their varlen calls allocate the output.
Over a cached prefix vLLM attends to chunks without a mask and merges them; SGLang makes one call, as here.
Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kernels import vendor
from kernels.binding import Function
from kernels.mha_prefill import layouts
from kernels.mha_prefill.operands import GUARD, MhaPrefillOperands
from kernels.mha_prefill.sizes import BYTES, VALUE, WIDTH, MhaPrefillSizes, takes
from kernels.op import Prepared
from kernels.platform import Platform
from kernels.support import Support, need
from shapes.case import Case

if TYPE_CHECKING:
    import torch


DESCALES = "q_descale k_descale v_descale"

# flash_attn may be installed without its kernels, as what FlashAttention 4 lives in.
FA2 = Function("flash_attn.flash_attn_interface.flash_attn_varlen_func", needs=layouts.VARLEN)
FA3 = Function("flash_attn_interface.flash_attn_varlen_func", needs=layouts.VARLEN)
FA3_FP8 = FA3.needing(DESCALES, when="dtype=fp8")
FA4 = Function(
    "flash_attn.cute.flash_attn_varlen_func",
    "flash_attn.cute.interface.flash_attn_varlen_func",
    needs=layouts.VARLEN,
    wishes="num_splits",
)
VLLM = Function(
    "vllm.vllm_flash_attn.flash_attn_varlen_func", needs=f"{layouts.VARLEN} fa_version num_splits"
)
VLLM_FP8 = VLLM.needing(DESCALES, when="dtype=fp8")
SGLANG = Function("sgl_kernel.flash_attn.flash_attn_varlen_func", needs=layouts.VARLEN)
SGLANG_FP8 = SGLANG.needing(DESCALES, when="dtype=fp8")


class FlashAttentionPrefill(vendor.FlashAttention):
    """A generation of FlashAttention.

    archs:  those that it has kernels for at 192/128
    dtypes: of q, k and v
    """

    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes(sizes, *self.dtypes)

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """The call's own output, and a sum of exponentials per row."""
        return sizes.queries * sizes.heads * (VALUE * BYTES["bf16"] + 4)


class FlashAttentionFa2Prefill(FlashAttentionPrefill):
    """One head size only: v stands 192 wide, filled up with zeros, as vLLM calls it."""

    name = "flash_attn.fa2"
    requires = "flash-attn 2.1 or later (before, causal began at the first key), CUDA sm_80 or later"
    library = "flash_attn"
    install = "pip install flash-attn --no-build-isolation"
    archs = vendor.SINCE_AMPERE
    symbols = (FA2,)

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """v in its layout, the call's own output as wide, and a sum of exponentials per row."""
        wide = (sizes.keys + 2 * GUARD + sizes.queries) * sizes.heads * WIDTH * BYTES["bf16"]
        return wide + sizes.queries * sizes.heads * 4

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        return layouts.VarlenLayout(operands, None, FA2, pads=True)


def descales(o: MhaPrefillOperands) -> dict[str, object]:
    """fp32 [batch, heads]: the one of the tensor for each."""
    if o.q_descale is None:
        return {}
    shape = (len(o.sequences), o.q.shape[1])
    named = {"q_descale": o.q_descale, "k_descale": o.k_descale, "v_descale": o.v_descale}
    return {name: descale.expand(shape).contiguous() for name, descale in named.items()}


class FlashAttentionFa3Prefill(FlashAttentionPrefill, vendor.FlashAttention3):
    """Hopper's, 192/128 as it is; FP8 with weights rounded to e4m3fn."""

    name = "flash_attn.fa3"
    requires = "FlashAttention 3 of 2025-03 or later (module flash_attn_interface), CUDA sm_90"
    dtypes = ("bf16", "fp8")
    activations = "fp8"
    symbols = (FA3, FA3_FP8)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        return layouts.VarlenLayout(
            operands, None, FA3_FP8 if descales(operands) else FA3, descales(operands)
        )


class FlashAttentionFa3OfVllmPrefill(vendor.FlashAttentionOfVllm, FlashAttentionFa3Prefill):
    """As vLLM ships and calls it: its default on Hopper. vLLM itself keeps q, k and v in bf16."""

    name = "flash_attn.fa3@vllm"
    requires = "vLLM for CUDA (read at 0.33), sm_90"
    symbols = (VLLM, VLLM_FP8)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        return of_vllm(operands, 3)


class FlashAttentionFa3OfSglangPrefill(vendor.FlashAttentionOfSglang, FlashAttentionFa3Prefill):
    """As SGLang ships it: its default on Hopper."""

    name = "flash_attn.fa3@sglang"
    requires = "sglang-kernel (read at 0.4.10), sm_90"
    symbols = (SGLANG, SGLANG_FP8)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        given = descales(operands)
        return layouts.VarlenLayout(operands, None, SGLANG_FP8 if given else SGLANG, given)


class Fa4Prefill(FlashAttentionPrefill, vendor.FlashAttention4):
    """In CuTe, for Hopper and Blackwell, 192/128 as it is. Its public call takes no descales."""

    name = "flash_attn.fa4"
    requires = "flash-attn-4 4.0.0b1 or later (module flash_attn.cute), CUDA sm_90, sm_100 or sm_103"
    archs = ("sm_90", *vendor.BLACKWELL)
    symbols = (FA4,)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        return layouts.VarlenLayout(operands, None, FA4, {"num_splits": 1})


class Fa4OfVllmPrefill(FlashAttentionPrefill, vendor.FlashAttentionOfVllm):
    """As vLLM ships and calls it, which leaves the number of splits to it; FP8 on Blackwell alone."""

    name = "flash_attn.fa4@vllm"
    requires = "vLLM for CUDA (read at 0.33), sm_90, sm_100 or sm_103"
    archs = ("sm_90", *vendor.BLACKWELL)
    dtypes = ("bf16", "fp8")
    activations = "fp8"
    symbols = (VLLM, VLLM_FP8)

    def supports(self, case: Case, platform: Platform) -> Support:
        fp8 = case.sizes.get("dtype") == "fp8"
        allowed = need(not fp8 or platform.arch in vendor.BLACKWELL, f"takes dtype=bf16 on {platform.arch}")
        return Support.all_of(super().supports(case, platform), allowed)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        return of_vllm(operands, 4)


def of_vllm(operands: MhaPrefillOperands, version: int) -> Prepared:
    """A call of vLLM's function for both."""
    given = descales(operands)
    further = {**given, "fa_version": version, "num_splits": 0}
    return layouts.VarlenLayout(operands, None, VLLM_FP8 if given else VLLM, further)
