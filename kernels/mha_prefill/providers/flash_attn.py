"""FlashAttention 2, 3 and 4, each a package of its own; 3 also within both engines, 4 also within vLLM.

Read at 2026-08: flash_attn/flash_attn_interface.py (2.8.3), hopper/flash_attn_interface.py and
hopper/flash_api.cpp (3.0.0), flash_attn/cute/interface.py (4.0.0b36); vllm_flash_attn/flash_attn_interface.py
of vLLM 0.33, with how its v1/attention/backends/mla/prefill/flash_attn.py calls it; sgl_kernel/flash_attn.py
of sglang-kernel 0.4.10. Their varlen calls allocate the output. Untested on hardware."""

from __future__ import annotations

from typing import Any

from kernels import vendor
from kernels.binding import Function
from kernels.mha_prefill.layouts import DESCALES, VARLEN, allocated_bytes, padded, padded_bytes, varlen
from kernels.mha_prefill.operands import WIDTH, MhaPrefillOperands, takes
from kernels.op import Prepared, implementation
from kernels.support import need


def bf16_and_fp8(place: str, needs: str = VARLEN) -> tuple[Function, Function]:
    """A library's function as it is called with bf16 operands, and with FP8 ones."""
    function = Function(place, needs=needs)
    return function, function.needing(DESCALES, when="dtype=fp8")


# Not `flash_attn` itself: FlashAttention 4 lives in it, so that it may be installed without the kernels of 2.
FA2 = Function("flash_attn.flash_attn_interface.flash_attn_varlen_func", needs=VARLEN)
FA3 = bf16_and_fp8("flash_attn_interface.flash_attn_varlen_func")
FA4 = Function(
    "flash_attn.cute.flash_attn_varlen_func",
    "flash_attn.cute.interface.flash_attn_varlen_func",
    needs=VARLEN,
    wishes="num_splits",
)
VLLM = bf16_and_fp8("vllm.vllm_flash_attn.flash_attn_varlen_func", f"{VARLEN} fa_version num_splits")
SGLANG = bf16_and_fp8("sgl_kernel.flash_attn.flash_attn_varlen_func")
FROM_HOPPER = ("sm_90", *vendor.BLACKWELL)
TAKES_BOTH: dict[str, Any] = {
    "activations": "fp8",
    "fits": takes("bf16", "fp8"),
    "workspace": allocated_bytes,
}
"""What the rows that also take FP8 operands declare."""


@implementation(
    "flash_attn.fa2",
    vendor.FlashAttention,
    requires="flash-attn 2.1 or later (before, causal began at the first key), CUDA sm_80 or later",
    library="flash_attn",
    archs=vendor.SINCE_AMPERE,
    symbols=(FA2,),
    fits=takes("bf16"),
    workspace=lambda sizes: padded_bytes(sizes) + allocated_bytes(sizes, WIDTH),
)
def fa2(operands: MhaPrefillOperands, out: None) -> Prepared:
    """It takes one head size only, so that v is filled up with zeros to a width of 192, as in vLLM."""
    return varlen(operands, FA2, padded(operands.v))


@implementation(
    "flash_attn.fa3",
    vendor.FlashAttention3,
    requires="FlashAttention 3 of 2025-03 or later (module flash_attn_interface), CUDA sm_90",
    symbols=FA3,
    **TAKES_BOTH,
)
def fa3(operands: MhaPrefillOperands, out: None) -> Prepared:
    """Hopper's kernels, which take widths of 192 and 128. With FP8 they round softmax weights to e4m3fn."""
    return attend(operands, FA3)


@implementation(
    "flash_attn.fa3@vllm",
    vendor.FlashAttentionOfVllm,
    requires="vLLM for CUDA (read at 0.33), sm_90",
    archs=("sm_90",),
    symbols=VLLM,
    **TAKES_BOTH,
)
def fa3_of_vllm(operands: MhaPrefillOperands, out: None) -> Prepared:
    """FlashAttention 3 as vLLM ships and calls it, its default on Hopper. vLLM keeps q, k and v in bf16."""
    return attend(operands, VLLM, fa_version=3, num_splits=0)


@implementation(
    "flash_attn.fa3@sglang",
    vendor.FlashAttentionOfSglang,
    requires="sglang-kernel (read at 0.4.10), sm_90",
    archs=("sm_90",),
    symbols=SGLANG,
    **TAKES_BOTH,
)
def fa3_of_sglang(operands: MhaPrefillOperands, out: None) -> Prepared:
    """FlashAttention 3 as SGLang ships it, SGLang's default on Hopper."""
    return attend(operands, SGLANG)


@implementation(
    "flash_attn.fa4",
    vendor.FlashAttention4,
    requires="flash-attn-4 4.0.0b1 or later (module flash_attn.cute), CUDA sm_90, sm_100 or sm_103",
    archs=FROM_HOPPER,
    symbols=(FA4,),
    fits=takes("bf16"),
    workspace=allocated_bytes,
)
def fa4(operands: MhaPrefillOperands, out: None) -> Prepared:
    """The kernels in CuTe, which take widths of 192 and 128. The public call takes no descales."""
    return varlen(operands, FA4, num_splits=1)


@implementation(
    "flash_attn.fa4@vllm",
    vendor.FlashAttentionOfVllm,
    requires="vLLM for CUDA (read at 0.33), sm_90, sm_100 or sm_103",
    archs=FROM_HOPPER,
    symbols=VLLM,
    supports=lambda case, platform: need(
        case.sizes.get("dtype") != "fp8" or platform.arch in vendor.BLACKWELL,
        f"takes dtype=bf16 on {platform.arch}",
    ),
    **TAKES_BOTH,
)
def fa4_of_vllm(operands: MhaPrefillOperands, out: None) -> Prepared:
    """FlashAttention 4 as vLLM ships and calls it: the kernel chooses the number of splits."""
    return attend(operands, VLLM, fa_version=4, num_splits=0)


def attend(o: MhaPrefillOperands, functions: tuple[Function, Function], **further: Any) -> Prepared:
    """The call for the operands' dtype. functions: from `bf16_and_fp8`"""
    of_bf16, of_fp8 = functions
    # fp32 [batch, heads]: the descale of the tensor, once for each head of each sequence.
    shape = (len(o.sequences), o.q.shape[1])
    descales = {name: descale.expand(shape).contiguous() for name, descale in o.descales.items()}
    return varlen(o, of_fp8 if o.is_fp8 else of_bf16, **descales, **further)
