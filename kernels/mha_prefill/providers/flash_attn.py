"""FlashAttention 2, 3 and 4, each a package of its own; 3 and 4 within both engines too.

Read at 2026-08: flash_attn/flash_attn_interface.py (2.8.3), hopper/flash_attn_interface.py and
hopper/flash_api.cpp (3.0.0), flash_attn/cute/interface.py (4.0.0b36); vllm_flash_attn/flash_attn_interface.py
of vLLM 0.33, with how its v1/attention/backends/mla/prefill/flash_attn.py calls it; sgl_kernel/flash_attn.py
of sglang-kernel 0.4.10. All align the causal mask to the last key. Their varlen calls allocate the output.
Over a cached prefix vLLM attends to chunks without a mask and merges them; SGLang makes one call, as here.
Untested on hardware.
"""

from __future__ import annotations

from typing import Any

from kernels import vendor
from kernels.binding import Function
from kernels.mha_prefill.layouts import VARLEN, varlen
from kernels.mha_prefill.operands import (
    BYTES,
    GUARD,
    VALUE,
    WIDTH,
    MhaPrefillOperands,
    MhaPrefillSizes,
    takes,
)
from kernels.op import Prepared, implementation
from kernels.platform import Platform
from kernels.support import Support, need
from shapes.case import Case

DESCALES = "q_descale k_descale v_descale"

# flash_attn may be installed without its kernels, because FlashAttention 4 lives in it.
FA2 = Function("flash_attn.flash_attn_interface.flash_attn_varlen_func", needs=VARLEN)
FA3 = Function("flash_attn_interface.flash_attn_varlen_func", needs=VARLEN)
FA3_FP8 = FA3.needing(DESCALES, when="dtype=fp8")
FA4 = Function(
    "flash_attn.cute.flash_attn_varlen_func",
    "flash_attn.cute.interface.flash_attn_varlen_func",
    needs=VARLEN,
    wishes="num_splits",
)
VLLM = Function("vllm.vllm_flash_attn.flash_attn_varlen_func", needs=f"{VARLEN} fa_version num_splits")
VLLM_FP8 = VLLM.needing(DESCALES, when="dtype=fp8")
SGLANG = Function("sgl_kernel.flash_attn.flash_attn_varlen_func", needs=VARLEN)
SGLANG_FP8 = SGLANG.needing(DESCALES, when="dtype=fp8")

FROM_HOPPER = ("sm_90", *vendor.BLACKWELL)


def workspace(sizes: MhaPrefillSizes) -> int:
    """The call's own output, and a sum of exponentials for each row."""
    return sizes.queries * sizes.heads * (VALUE * BYTES["bf16"] + 4)


TAKES_BOTH: dict[str, Any] = {"activations": "fp8", "fits": takes("bf16", "fp8"), "workspace": workspace}
"""What the rows declare that take FP8 operands too."""


def wide_workspace(sizes: MhaPrefillSizes) -> int:
    """v in its layout, the call's own output as wide, and a sum of exponentials for each row."""
    wide = (sizes.keys + 2 * GUARD + sizes.queries) * sizes.heads * WIDTH * BYTES["bf16"]
    return wide + sizes.queries * sizes.heads * 4


@implementation(
    "flash_attn.fa2",
    vendor.FlashAttention,
    requires="flash-attn 2.1 or later (before, causal began at the first key), CUDA sm_80 or later",
    library="flash_attn",
    install="pip install flash-attn --no-build-isolation",
    archs=vendor.SINCE_AMPERE,
    symbols=(FA2,),
    fits=takes("bf16"),
    workspace=wide_workspace,
)
def fa2(operands: MhaPrefillOperands, out: None) -> Prepared:
    """It takes one head size only: v is 192 wide, filled up with zeros, as vLLM calls it."""
    return varlen(operands, None, FA2, pads=True)


@implementation(
    "flash_attn.fa3",
    vendor.FlashAttention3,
    requires="FlashAttention 3 of 2025-03 or later (module flash_attn_interface), CUDA sm_90",
    symbols=(FA3, FA3_FP8),
    **TAKES_BOTH,
)
def fa3(operands: MhaPrefillOperands, out: None) -> Prepared:
    """Hopper's kernels, which take widths of 192 and 128 as they are. With FP8 they round the softmax weights
    to e4m3fn."""
    return varlen(operands, None, FA3_FP8 if operands.is_fp8 else FA3, **descales(operands))


@implementation(
    "flash_attn.fa3@vllm",
    vendor.FlashAttentionOfVllm,
    requires="vLLM for CUDA (read at 0.33), sm_90",
    archs=("sm_90",),
    symbols=(VLLM, VLLM_FP8),
    **TAKES_BOTH,
)
def fa3_of_vllm(operands: MhaPrefillOperands, out: None) -> Prepared:
    """FlashAttention 3 as vLLM ships and calls it, its default on Hopper. vLLM keeps q, k and v in bf16."""
    return of_vllm(operands, 3)


@implementation(
    "flash_attn.fa3@sglang",
    vendor.FlashAttentionOfSglang,
    requires="sglang-kernel (read at 0.4.10), sm_90",
    archs=("sm_90",),
    symbols=(SGLANG, SGLANG_FP8),
    **TAKES_BOTH,
)
def fa3_of_sglang(operands: MhaPrefillOperands, out: None) -> Prepared:
    """FlashAttention 3 as SGLang ships it, SGLang's default on Hopper."""
    return varlen(operands, None, SGLANG_FP8 if operands.is_fp8 else SGLANG, **descales(operands))


@implementation(
    "flash_attn.fa4",
    vendor.FlashAttention4,
    requires="flash-attn-4 4.0.0b1 or later (module flash_attn.cute), CUDA sm_90, sm_100 or sm_103",
    archs=FROM_HOPPER,
    symbols=(FA4,),
    fits=takes("bf16"),
    workspace=workspace,
)
def fa4(operands: MhaPrefillOperands, out: None) -> Prepared:
    """The kernels in CuTe for Hopper and Blackwell, which take widths of 192 and 128 as they are. The public
    call takes no descales."""
    return varlen(operands, None, FA4, num_splits=1)


def fp8_on_blackwell(case: Case, platform: Platform) -> Support:
    fp8 = case.sizes.get("dtype") == "fp8"
    return need(not fp8 or platform.arch in vendor.BLACKWELL, f"takes dtype=bf16 on {platform.arch}")


@implementation(
    "flash_attn.fa4@vllm",
    vendor.FlashAttentionOfVllm,
    requires="vLLM for CUDA (read at 0.33), sm_90, sm_100 or sm_103",
    runtime="flash_attn",
    archs=FROM_HOPPER,
    symbols=(VLLM, VLLM_FP8),
    supports=fp8_on_blackwell,
    **TAKES_BOTH,
)
def fa4_of_vllm(operands: MhaPrefillOperands, out: None) -> Prepared:
    """FlashAttention 4 as vLLM ships and calls it: the kernel chooses the number of splits. It takes FP8 on
    Blackwell only."""
    return of_vllm(operands, 4)


def of_vllm(operands: MhaPrefillOperands, version: int) -> Prepared:
    function = VLLM_FP8 if operands.is_fp8 else VLLM
    return varlen(operands, None, function, **descales(operands), fa_version=version, num_splits=0)


def descales(o: MhaPrefillOperands) -> dict[str, Any]:
    """fp32 [batch, heads]: the descale of the tensor for each. Empty for bf16."""
    if not o.is_fp8:
        return {}
    shape = (len(o.sequences), o.q.shape[1])
    named = {"q_descale": o.q_descale, "k_descale": o.k_descale, "v_descale": o.v_descale}
    return {name: descale.expand(shape).contiguous() for name, descale in named.items()}
