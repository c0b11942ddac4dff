"""FlashAttention with its second part of the query, qv: it computes MLA as softmax(scale (q k^T + qv v^T)) v.

k is the rope part of the cache and v the latent one, views of the same rows. FlashAttention 3 comes by itself
and within both engines, each time with other Python around it.

Sources: hopper/flash_attn_interface.py, flash_api.cpp and paged_kv.h of Dao-AILab/flash-attention at 0251105
(2026-08); vllm_flash_attn/flash_attn_interface.py of vLLM 0.33, with how its
v1/attention/backends/mla/flashattn_mla.py calls it; sgl_kernel/flash_attn.py of sglang-kernel 0.4.10, with
how SGLang 0.5.23's srt/layers/attention/flashattention_backend.py calls it; flash_attn/cute/interface.py of
flash-attn-4 4.0.0b36. Untested on hardware."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kernels import vendor
from kernels.attention import arguments_of
from kernels.binding import Function, Symbol
from kernels.lazy import torch
from kernels.mla_decode import layouts
from kernels.mla_decode.operands import MlaDecodeOperands, MlaDecodeSizes, takes
from kernels.op import Prepared, implementation
from kernels.support import Support, need
from shapes.case import MOST_QUERIES

ATTEND_ARGUMENTS = "q k_cache v_cache qv page_table cache_seqlens softmax_scale causal"
SCHEDULE_ARGUMENTS = (
    "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim headdim_v cache_seqlens qkv_dtype "
    "page_size causal"
)
WITH_CACHE = Function(
    "flash_attn_interface.flash_attn_with_kvcache", needs=f"{ATTEND_ARGUMENTS} scheduler_metadata"
)
SCHEDULE = Function("flash_attn_interface.get_scheduler_metadata", needs=SCHEDULE_ARGUMENTS)
VLLM_VARLEN = Function(
    "vllm.vllm_flash_attn.flash_attn_varlen_func",
    needs="q k v q_v max_seqlen_q cu_seqlens_q max_seqlen_k seqused_k block_table softmax_scale causal "
    "fa_version scheduler_metadata num_splits",
)
VLLM_SCHEDULE = Function(
    "vllm.vllm_flash_attn.get_scheduler_metadata", needs=f"{SCHEDULE_ARGUMENTS} cu_seqlens_q num_splits"
)
SGLANG_WITH_CACHE = Function(
    "sgl_kernel.flash_attn.flash_attn_with_kvcache",
    needs=f"{ATTEND_ARGUMENTS} cu_seqlens_q max_seqlen_q num_splits",
)
# The most parts into which vLLM has a sequence split where it records graphs
# (flash_attn_max_num_splits_for_cuda_graph).
SPLITS_OF_VLLM = 32
FA4_VARLEN = Function(
    "flash_attn.cute.flash_attn_varlen_func",
    needs="q k v qv seqused_k page_table softmax_scale causal",
    wishes="max_seqlen_k num_splits",
)
# FlashAttention 4 splits MLA's sequences in versions with this function. Older ones refuse several splits.
MLA_PLAN = Symbol("flash_attn.cute.interface._mla_fwd_plan")


def fa3_bytes(sizes: MlaDecodeSizes, splits: int) -> int:
    """The bytes of the copy of the cache and of the partial results of so many splits."""
    return layouts.partial_bytes(sizes.rows * splits) + layouts.cache_bytes(sizes)


@implementation(
    "flash_attn.fa3",
    vendor.FlashAttention3,
    requires="FlashAttention 3 with qv and get_scheduler_metadata (2025-03 or later, from source), sm_90",
    symbols=(WITH_CACHE, SCHEDULE),
    fits=takes("bf16", most_q=MOST_QUERIES),
    workspace=lambda sizes: fa3_bytes(sizes, most_splits(sizes.q * sizes.heads, max(sizes.lengths()))),
)
def fa3(o: MlaDecodeOperands, out: None) -> Prepared:
    """`flash_attn_with_kvcache`, its schedule made before timing. With more than 64 heads it multiplies whole
    pages, so it gets a cache without NaN."""
    table = layouts.finite_table(o, o.page)
    # The call chooses its splits by the longest sequence that the table has room for.
    longest = table.shape[1] * o.page
    schedule = layouts.bound(SCHEDULE, o, max_seqlen_k=longest)()
    return attend(WITH_CACHE, o, o.q, table, scheduler_metadata=schedule)


@implementation(
    "flash_attn.fa3@vllm",
    vendor.FlashAttentionOfVllm,
    requires="vLLM for CUDA (read at 0.33), sm_90",
    archs=("sm_90",),
    symbols=(VLLM_VARLEN, VLLM_SCHEDULE),
    fits=takes("bf16", most_q=MOST_QUERIES),
    workspace=lambda sizes: fa3_bytes(sizes, SPLITS_OF_VLLM),
)
def fa3_of_vllm(o: MlaDecodeOperands, out: None) -> Prepared:
    """As vLLM ships it and records it into graphs: `flash_attn_varlen_func` over a paged cache, its schedule
    made before timing, with a limit on the splits of a sequence, which vLLM sets for graphs alone."""
    table = layouts.finite_table(o, o.page)
    # vLLM makes the schedule in each step, for its lengths; it records the call once, for any lengths.
    common = {"cu_seqlens_q": layouts.query_starts(o), "causal": True, "num_splits": SPLITS_OF_VLLM}
    schedule = layouts.bound(VLLM_SCHEDULE, o, max_seqlen_k=max(o.host_lengths), **common)()
    of_call = {"max_seqlen_k": o.sizes.model_len, "fa_version": 3, "scheduler_metadata": schedule}
    return attend(VLLM_VARLEN, o, o.packed, table, o.unpacked, **common, **of_call)


@implementation(
    "flash_attn.fa3@sglang",
    vendor.FlashAttentionOfSglang,
    requires="sglang-kernel (read at 0.4.10), sm_90",
    archs=("sm_90",),
    symbols=(SGLANG_WITH_CACHE,),
    fits=takes("bf16", most_q=MOST_QUERIES),
    layout=lambda sizes: sizes.batch * math.ceil(sizes.model_len / sizes.page) * 4,
    workspace=lambda sizes: fa3_bytes(sizes, most_splits(sizes.q * sizes.heads, sizes.model_len)),
)
def fa3_of_sglang(o: MlaDecodeOperands, out: None) -> Prepared:
    """As SGLang ships and calls it: without a schedule, so that a kernel makes one in each call, and with a
    table for the server's context length, by which the call limits the splits of a sequence."""
    table = layouts.finite_table(o, o.page, min_tokens=o.sizes.model_len)
    return attend(SGLANG_WITH_CACHE, o, o.packed, table, o.unpacked, causal=True, num_splits=0)


@implementation(
    "flash_attn.fa4",
    vendor.FlashAttention4,
    requires="FlashAttention 4 (flash-attn-4) with qv, sm_100 or sm_103; it splits from 4.0.0b36",
    archs=vendor.BLACKWELL,  # those on which it takes qv
    symbols=(FA4_VARLEN,),
    fits=lambda sizes: Support.all_of(
        takes("bf16", most_q=MOST_QUERIES)(sizes),
        need(128 % sizes.heads == 0, f"takes heads that divide 128, not {sizes.heads}"),
    ),
    # Partial results of as many splits as fill the device; the copy of the cache.
    workspace=lambda sizes: (
        layouts.partial_bytes((sizes.batch + layouts.MOST_UNITS) * sizes.q * sizes.heads)
        + layouts.cache_bytes(sizes)
    ),
)
def fa4(o: MlaDecodeOperands, out: None) -> Prepared:
    """`flash_attn_varlen_func` of the CuTe DSL. It loads whole pages, so it gets a cache without NaN. With
    fewer than 64 heads one query token and several run different kernels: the one that takes 64 keys at a
    time is for one alone (flash_fwd_mla_1cta_kb64_sm100.py)."""
    table = layouts.finite_table(o, o.page)
    num_splits = 0 if MLA_PLAN.exists() else 1  # 0: the call chooses
    arguments = {"max_seqlen_k": max(o.host_lengths), "num_splits": num_splits}
    return attend(FA4_VARLEN, o, o.q, table, lambda out_and_log_sums: out_and_log_sums[0], **arguments)


def attend(
    function: Function,
    o: MlaDecodeOperands,
    q: torch.Tensor,
    table: torch.Tensor,
    result: Callable[[Any], torch.Tensor] | None = None,
    **further: Any,
) -> Prepared:
    """The call on a cache without NaN. q: [..., heads, 576]; result: as in Prepared"""
    cache = layouts.FiniteCache(o)
    qv, q = layouts.latent_and_rope(q)
    v, k = layouts.latent_and_rope(cache.kv[:, :, None])
    parts = {"q": q, "qv q_v": qv, "k k_cache": k, "v v_cache": v, "page_table block_table": table}
    call = layouts.bound(function, o, **arguments_of(function, parts), **further)
    return cache.prepared(None, call, result)


def most_splits(rows: int, tokens: int) -> int:
    """The most splits that FA3 makes of sequences of so many tokens: at most 128, and so many that the tiles
    of a single sequence fill an H100 (num_splits_heuristic in hopper/heuristics.h). A tile for MLA has 64
    rows, which are heads of query tokens, and 64 keys (tile_size_fwd_sm90 in hopper/tile_size.h)."""
    to_fill_device = layouts.HOPPER_UNITS // math.ceil(rows / 64)
    return max(1, min(128, to_fill_device, math.ceil(tokens / 64)))
