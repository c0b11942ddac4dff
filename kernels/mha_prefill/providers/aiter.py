"""AMD's AITER: its dispatching MHA, each of the kernels behind it, that in FP8, and its Triton one.

Read at e404860 (2026-08, after 0.1.20): aiter/ops/mha.py, aiter/ops/triton/attention/mha.py,
csrc/py_itfs_cu/asm_mha_varlen_fwd.cu, csrc/py_itfs_ck/mha_varlen_fwd_kernels.cu, and the signatures at the
tags from 0.1.4. Kernels are built at the first call. Over a cached prefix vLLM attends to chunks without a
mask and merges them (run_prefill_context_chunk in v1/attention/backends/mla/prefill/aiter_flash_attn.py of
vLLM 0.33); SGLang makes one call, as here. Untested on hardware.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from kernels import vendor
from kernels.binding import BindingError, Function, Symbol
from kernels.mha_prefill import layouts
from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import BYTES, VALUE, WIDTH, MhaPrefillSizes, takes
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch


DISPATCH = Function(
    "aiter.flash_attn_varlen_func", "aiter.ops.mha.flash_attn_varlen_func", needs=f"{layouts.VARLEN} out"
)
TRITON = Function(
    "aiter.ops.triton.attention.mha.flash_attn_varlen_func",
    "aiter.ops.triton.mha.flash_attn_varlen_func",
    needs=layouts.VARLEN,
)
PER_TENSOR = Function(
    "aiter.flash_attn_varlen_fp8_pertensor_func",
    "aiter.ops.mha.flash_attn_varlen_fp8_pertensor_func",
    needs=f"{layouts.VARLEN} q_descale k_descale v_descale",
)
# What the asm and the CK entry want beside what `flash_attn_varlen_func` takes: none has a default.
FORWARD = (
    "q k v out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_q dropout_p softmax_scale "
    "logits_soft_cap zero_tensors is_causal window_size_left window_size_right return_softmax_lse "
    "return_dropout_randval"
)
ASM = Function(
    "aiter.fmha_v3_varlen_fwd", "aiter.ops.mha.fmha_v3_varlen_fwd", needs=f"{FORWARD} how_v3_bf16_cvt"
)
CK = Function("aiter.mha_varlen_fwd", "aiter.ops.mha.mha_varlen_fwd", needs=FORWARD, wishes="sink_size")
OPUS = Function(
    "aiter.ops.mha.fmha_fwd_bf16_opus_varlen_fwd",
    "aiter.fmha_fwd_bf16_opus_varlen_fwd",
    needs="q k v out softmax_scale causal seqstart_q seqstart_k max_seqlen_q max_seqlen_k",
)
# From 0.1.16 on the dispatching call imports this on all architectures.
FLYDSL = Symbol("aiter.ops.flydsl.fmha_kernels.flydsl_flash_attn_varlen_func")


class AiterPrefill(vendor.Aiter):
    """A kernel of AITER.

    dtypes: of q, k and v
    """

    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes(sizes, *self.dtypes)


class DispatchPrefill(AiterPrefill):
    """`flash_attn_varlen_func`, as vLLM and SGLang call it: asm v3 on gfx942; on gfx950 OPUS where it has
    that (0.1.18 or later), before asm v3; CK, which truncates, where neither fits."""

    name = "aiter.dispatch"
    truncates = True
    requires = "AITER 0.1.4 or later (from 0.1.16 on with flydsl), gfx942 or gfx950"
    symbols = (DISPATCH,)
    since = "0.1.4"

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        with contextlib.suppress(BindingError):  # an AITER without that module
            FLYDSL.find()
        return layouts.VarlenLayout(operands, out, DISPATCH)


def forward_arguments(o: MhaPrefillOperands) -> dict[str, object]:
    """What the asm and the CK entry get beside q, k, v and out, as `flash_attn_varlen_func` gives it."""
    return {
        **layouts.lengths(o),
        "min_seqlen_q": 0,
        "dropout_p": 0.0,
        "softmax_scale": layouts.scale(o),
        "logits_soft_cap": 0.0,
        "zero_tensors": False,
        "is_causal": layouts.mask()["causal"],
        "window_size_left": -1,
        "window_size_right": -1,
        "return_softmax_lse": False,
        "return_dropout_randval": False,
    }


class _Direct(Prepared):
    def __init__(
        self, operands: MhaPrefillOperands, out: torch.Tensor, function: Function, **arguments: Any
    ) -> None:
        super().__init__(operands, out)
        self.attend = function.bind(q=operands.q, k=operands.k, v=operands.v, out=out, **arguments)

    def call(self) -> None:
        self.attend()


class AsmPrefill(AiterPrefill):
    """The hand-written kernel (fmha v3) by itself."""

    name = "aiter.asm"
    requires = "AITER 0.1.5 or later, gfx942 or gfx950"
    symbols = (ASM,)
    since = "0.1.5"

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        longest = max(prefix + new for prefix, new in sizes.lengths())
        extent = longest * sizes.heads * WIDTH * 2
        return Support.all_of(
            super().fits(sizes),
            need(extent < 1 << 32, "its byte offsets within a sequence's keys end at 4 GiB"),
        )

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        # 1, as the dispatch has it: gfx942's kernels round weights to nearest, ties away from zero.
        return _Direct(operands, out, ASM, **forward_arguments(operands), how_v3_bf16_cvt=1)


class CkPrefill(AiterPrefill):
    """Composable Kernel by itself. Weights and output are truncated to bf16: aiter/jit/optCompilerConfig.json
    builds module_mha_varlen_fwd with -DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=2 (at e404860), on all
    architectures."""

    name = "aiter.ck"
    truncates = True
    requires = "AITER 0.1.8 or later, gfx942 or gfx950"
    symbols = (CK,)
    since = "0.1.8"

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Direct(operands, out, CK, **forward_arguments(operands), sink_size=0)


def opus_lengths(o: MhaPrefillOperands) -> dict[str, object]:
    named = layouts.lengths(o)
    return {
        "seqstart_q": named["cu_seqlens_q"],
        "seqstart_k": named["cu_seqlens_k"],
        "max_seqlen_q": named["max_seqlen_q"],
        "max_seqlen_k": named["max_seqlen_k"],
        "softmax_scale": layouts.scale(o),
    }


class Opus(AiterPrefill):
    """The OPUS kernel by itself, which gfx950 dispatches to."""

    name = "aiter.opus"
    requires = "AITER 0.1.18 or later, gfx950"
    archs = ("gfx950",)
    symbols = (OPUS,)
    since = "0.1.18"

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Direct(operands, out, OPUS, **opus_lengths(operands), **layouts.mask())


class TritonPrefill(AiterPrefill):
    """AITER's Triton kernel, q and k in parts of 128 and 64. Its call allocates an output of zeros."""

    name = "aiter.triton"
    also = vendor.TRITON
    requires = "AITER 0.1.7 or later, gfx942 or gfx950"
    symbols = (TRITON,)
    since = "0.1.7"
    allocates = True

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """The output, and a sum of exponentials per row."""
        return sizes.queries * sizes.heads * (VALUE * BYTES["bf16"] + 4)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        return layouts.VarlenLayout(operands, None, TRITON)


def descales(o: MhaPrefillOperands) -> dict[str, torch.Tensor]:
    """fp32 [1], by which what is stored is to be multiplied."""
    return {"q_descale": o.q_descale, "k_descale": o.k_descale, "v_descale": o.v_descale}


class Fp8(AiterPrefill):
    """`flash_attn_varlen_fp8_pertensor_func`: CK at 192/128, for which no asm kernel is built, with an
    output truncated as CkPrefill's. The call allocates it."""

    name = "aiter.fp8"
    requires = "AITER 0.1.8 or later, gfx942 (e4m3fnuz) or gfx950 (e4m3fn)"
    symbols = (PER_TENSOR,)
    since = "0.1.8"
    dtypes = ("fp8",)
    activations = "fp8"
    truncates = True
    allocates = True

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        return sizes.queries * sizes.heads * VALUE * BYTES["bf16"]

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor | None) -> Prepared:
        return layouts.VarlenLayout(operands, None, PER_TENSOR, descales(operands))
