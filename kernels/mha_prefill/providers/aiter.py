"""AMD's AITER: its dispatching MHA call and each of the kernels behind it, its Triton kernel, and its FP8
kernels.

Read at e404860 (2026-08, after 0.1.20): aiter/ops/mha.py, aiter/ops/triton/attention/mha.py,
csrc/py_itfs_cu/asm_mha_varlen_fwd.cu, csrc/py_itfs_ck/mha_varlen_fwd_kernels.cu, and the signatures at the
tags from 0.1.4; of the persistent kernel aiter/mla.py, aiter/ops/attention.py, csrc/py_itfs_cu/asm_mla.cu,
csrc/kernels/mla/{reduce.cu,metadata/v1_2_host.cuh}, op_tests/test_mla_prefill_ps.py. Kernels are built at the
first call. Untested on hardware."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from kernels.attention import arguments_of
from kernels.binding import BindingError, Function, Symbol
from kernels.lazy import torch
from kernels.mha_prefill.layouts import DESCALES, VARLEN, allocated_bytes, bound, varlen
from kernels.mha_prefill.operands import VALUE, WIDTH, MhaPrefillOperands, MhaPrefillSizes, takes
from kernels.op import Call, Prepared, implementation
from kernels.support import Support, need
from kernels.vendor import Aiter


def of_mha(name: str, needs: str, wishes: str = "") -> Function:
    return Function(f"aiter.{name}", f"aiter.ops.mha.{name}", needs=needs, wishes=wishes)


DISPATCH = of_mha("flash_attn_varlen_func", needs=f"{VARLEN} out")
TRITON = Function(
    "aiter.ops.triton.attention.mha.flash_attn_varlen_func",
    "aiter.ops.triton.mha.flash_attn_varlen_func",
    needs=VARLEN,
)
PER_TENSOR = of_mha("flash_attn_varlen_fp8_pertensor_func", needs=f"{VARLEN} {DESCALES}")
# Arguments without defaults of the asm and the CK function, with values that switch off what they stand for.
SWITCHED_OFF = {
    "min_seqlen_q": 0,
    "dropout_p": 0.0,
    "logits_soft_cap": 0.0,
    "zero_tensors": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "return_softmax_lse": False,
    "return_dropout_randval": False,
}
FORWARD = " ".join([VARLEN.replace("causal", "is_causal"), "out", *SWITCHED_OFF])
ASM = of_mha("fmha_v3_varlen_fwd", needs=f"{FORWARD} how_v3_bf16_cvt")
CK = of_mha("mha_varlen_fwd", needs=FORWARD, wishes="sink_size")
OPUS = Function(
    "aiter.ops.mha.fmha_fwd_bf16_opus_varlen_fwd",
    "aiter.fmha_fwd_bf16_opus_varlen_fwd",
    needs="q k v out softmax_scale causal seqstart_q seqstart_k max_seqlen_q max_seqlen_k",
)
# From 0.1.16 on the dispatching call imports this on all architectures, and fails without the module flydsl.
FLYDSL = Symbol("aiter.ops.flydsl.fmha_kernels.flydsl_flash_attn_varlen_func")


@implementation(
    "aiter.dispatch",
    Aiter,
    since="0.1.4",
    requires="AITER 0.1.4 or later (from 0.1.16 on with flydsl), gfx942 or gfx950",
    truncates=True,
    symbols=(DISPATCH,),
    fits=takes("bf16"),
)
def dispatch(operands: MhaPrefillOperands, out: torch.Tensor) -> Call:
    """`flash_attn_varlen_func`, as vLLM and SGLang call it. It runs asm v3 on gfx942; on gfx950 OPUS (0.1.18
    or later) and else asm v3; and CK, which truncates, where none of them fits."""
    # Raises Unsupported without flydsl. Versions of AITER without the function (BindingError) do not need it.
    with contextlib.suppress(BindingError):
        FLYDSL.find()
    return bound(DISPATCH, operands, out)


@implementation(
    "aiter.asm",
    Aiter,
    since="0.1.5",
    requires="AITER 0.1.5 or later, gfx942 or gfx950",
    symbols=(ASM,),
    fits=lambda sizes: Support.all_of(
        takes("bf16")(sizes),
        need(
            sizes.most_keys * sizes.heads * WIDTH * 2 < 1 << 32,
            "its byte offsets within a sequence's keys end at 4 GiB",
        ),
    ),
)
def asm(operands: MhaPrefillOperands, out: torch.Tensor) -> Call:
    """The hand-written kernel (fmha v3) by itself."""
    # 1, as in the dispatching call, means: gfx942's kernels round weights to nearest, ties away from zero.
    return bound(ASM, operands, out, **SWITCHED_OFF, how_v3_bf16_cvt=1)


@implementation(
    "aiter.ck",
    Aiter,
    since="0.1.8",
    requires="AITER 0.1.8 or later, gfx942 or gfx950",
    truncates=True,
    symbols=(CK,),
    fits=takes("bf16"),
)
def ck(operands: MhaPrefillOperands, out: torch.Tensor) -> Call:
    """Composable Kernel by itself. Weights and output are truncated to bf16, because module_mha_varlen_fwd is
    built with -DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=2 (aiter/jit/optCompilerConfig.json at e404860)."""
    return bound(CK, operands, out, **SWITCHED_OFF, sink_size=0)


@implementation(
    "aiter.opus",
    Aiter,
    since="0.1.18",
    requires="AITER 0.1.18 or later, gfx950",
    archs=("gfx950",),
    symbols=(OPUS,),
    fits=takes("bf16"),
)
def opus(o: MhaPrefillOperands, out: torch.Tensor) -> Call:
    """The OPUS kernel by itself, to which AITER dispatches on gfx950."""
    return bound(OPUS, o, out)


@implementation(
    "aiter.triton",
    Aiter,
    since="0.1.7",
    requires="AITER 0.1.7 or later, gfx942 or gfx950",
    also=("triton",),
    allocates=True,
    symbols=(TRITON,),
    fits=takes("bf16"),
    workspace=allocated_bytes,
)
def triton(operands: MhaPrefillOperands, out: None) -> Prepared:
    """AITER's Triton kernel, with q and k in parts of 128 and 64 columns. The call zeroes its output."""
    return varlen(operands, TRITON)


@implementation(
    "aiter.fp8",
    Aiter,
    since="0.1.8",
    requires="AITER 0.1.8 or later, gfx942 (e4m3fnuz) or gfx950 (e4m3fn)",
    activations="fp8",
    truncates=True,
    allocates=True,
    symbols=(PER_TENSOR,),
    fits=takes("fp8"),
    workspace=lambda sizes: sizes.queries * sizes.heads * VALUE * 2,
)
def fp8(o: MhaPrefillOperands, out: None) -> Prepared:
    """`flash_attn_varlen_fp8_pertensor_func`: CK, because no asm kernel is built for widths of 192 and 128.
    It truncates its output as `aiter.ck` does. The call allocates the output."""
    return varlen(o, PER_TENSOR)


# The persistent kernel

TILE_ROWS = 256  # query rows of its tiles
TILE_KEYS = 128  # keys of its tiles
MOST_UNITS = 256  # compute units of an MI350X or MI355X
# Heads that its reduction is built for at 128 columns (csrc/kernels/mla/reduce.cu, all tags from 0.1.11).
REDUCED_HEADS = (1, 2, 4, 8, 10, 16, 32, 64, 128)
REDUCED = "reduce_indptr reduce_final_map reduce_partial_map"
PLAN_TENSORS = ("work_metadata_ptrs", "work_indptr", "work_info work_info_set", *REDUCED.split())
"""The tensors of a plan, in the order in which `get_ps_metadata_info_v1` lists their shapes."""

INFO = Function(
    "aiter.get_ps_metadata_info_v1",
    "aiter.ops.attention.get_ps_metadata_info_v1",
    needs="batch_size num_head_k max_qlen qlen_granularity",
)
PLAN = Function(
    "aiter.get_ps_metadata_v1",
    "aiter.ops.attention.get_ps_metadata_v1",
    needs="seqlens_qo_indptr pages_kv_indptr context_lens gqa_ratio num_heads_k work_metadata_ptrs "
    f"work_indptr work_info {REDUCED} qhead_granularity qlen_granularity kvlen_granularity block_size "
    "is_causal",
)
PERSISTENT = Function(
    "aiter.mla.mla_prefill_ps_fwd",
    needs="Q K V output qo_indptr kv_indptr kv_page_indices work_indptr work_info_set max_seqlen_q is_causal "
    f"{REDUCED} softmax_scale q_scale k_scale v_scale",
)


def persistent_bytes(sizes: MhaPrefillSizes) -> int:
    """The bytes of partial results of split tiles, as many as get_ps_metadata_info_v1 reserves at most; of
    the rows' sums of exponentials; and of a page number for each key."""
    partials = min(sizes.batch + MOST_UNITS - 1, 2 * (MOST_UNITS - 1))
    partial_rows = partials * math.ceil(sizes.most_new / TILE_ROWS) * TILE_ROWS
    return sizes.heads * 4 * (partial_rows * (VALUE + 1) + sizes.queries) + 4 * sizes.keys


@implementation(
    "aiter.fp8_ps",
    Aiter,
    since="0.1.11",
    requires="AITER 0.1.11 or later, gfx950 (e4m3fn)",
    archs=("gfx950",),
    activations="fp8",
    symbols=(INFO, PLAN, PERSISTENT),
    fits=lambda sizes: Support.all_of(
        takes("fp8")(sizes),
        need(
            sizes.heads in REDUCED_HEADS,
            f"takes {', '.join(map(str, REDUCED_HEADS))} heads, not {sizes.heads}",
        ),
    ),
    workspace=persistent_bytes,
)
def fp8_persistent(o: MhaPrefillOperands, out: torch.Tensor) -> Call:
    """`mla.mla_prefill_ps_fwd`: the asm kernel, in which each program takes a share of the tiles, and the
    reduction of the tiles that were split over keys. The host plans the shares before timing."""
    shapes: Any = bound(INFO, o, qlen_granularity=TILE_ROWS)()
    if len(shapes) != len(PLAN_TENSORS):
        wanted = len(PLAN_TENSORS)
        raise BindingError(f"aiter's get_ps_metadata_info_v1 names {len(shapes)} tensors, not {wanted}")
    tensors = {
        names: torch.empty(shape, dtype=dtype, device=o.q.device)
        for names, (shape, dtype) in zip(PLAN_TENSORS, shapes, strict=True)
    }
    lengths = {
        "seqlens_qo_indptr": o.cu_q.cpu(),
        "pages_kv_indptr": o.cu_k.cpu(),
        "context_lens": torch.tensor([s.length for s in o.sequences], dtype=torch.int32),
    }
    tiles = {"qhead_granularity": 1, "qlen_granularity": TILE_ROWS, "kvlen_granularity": TILE_KEYS}
    bound(PLAN, o, gqa_ratio=1, **lengths, **tiles, block_size=1, **arguments_of(PLAN, tensors))()
    # Every key is a page of its own, in order.
    pages = torch.arange(len(o.k), dtype=torch.int32, device=o.k.device)
    return bound(PERSISTENT, o, out, kv_page_indices=pages, **arguments_of(PERSISTENT, tensors))
