"""FlashAttention 2, 3 and 4, each a package of its own.

Read at 2026-08: flash_attn/flash_attn_interface.py (2.8.3), hopper/flash_attn_interface.py and
hopper/flash_api.cpp (3.0.0), flash_attn/cute/interface.py. All align the causal mask to the last key. Their
varlen calls allocate the output. Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kernels import vendor
from kernels.binding import find
from kernels.mha_prefill import layouts
from kernels.mha_prefill.operands import GUARD, MhaPrefillOperands
from kernels.mha_prefill.sizes import BYTES, VALUE, WIDTH, MhaPrefillSizes, takes
from kernels.op import Prepared
from kernels.support import Support

if TYPE_CHECKING:
    import torch


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

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """v in its layout, the call's own output as wide, and a sum of exponentials per row."""
        wide = (sizes.keys + 2 * GUARD + sizes.queries) * sizes.heads * WIDTH * BYTES["bf16"]
        return wide + sizes.queries * sizes.heads * 4

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        # flash_attn may be installed without its kernels, as what FlashAttention 4 lives in.
        function = find("flash_attn.flash_attn_interface.flash_attn_varlen_func")
        return layouts.VarlenLayout(operands, None, function, pads=True)


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
    requires = "flash-attn-3 3.0.0b1 or later (module flash_attn_interface), CUDA sm_90"
    dtypes = ("bf16", "fp8")
    activations = "fp8"

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        function = find("flash_attn_interface.flash_attn_varlen_func")
        return layouts.VarlenLayout(operands, None, function, descales(operands))


class Fa4Prefill(FlashAttentionPrefill, vendor.FlashAttention4):
    """In CuTe, for Hopper and Blackwell, 192/128 as it is."""

    name = "flash_attn.fa4"
    requires = "flash-attn-4 4.0.0b1 or later (module flash_attn.cute), CUDA sm_90, sm_100 or sm_103"
    archs = ("sm_90", *vendor.BLACKWELL)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        function = find(
            "flash_attn.cute.flash_attn_varlen_func", "flash_attn.cute.interface.flash_attn_varlen_func"
        )
        return layouts.VarlenLayout(operands, None, function)
