"""FlashAttention with a second query part, which makes MLA of it: softmax(scale (q k^T + qv v^T)) v.

k is the rope part of the cache and v the latent one, views of the same rows. FlashAttention 3 comes by itself
and within both engines, each with a Python of its own. Sources: hopper/flash_attn_interface.py, flash_api.cpp
and paged_kv.h of Dao-AILab/flash-attention at 0251105 (2026-08); vllm_flash_attn/flash_attn_interface.py of
vLLM 0.33, with how its v1/attention/backends/mla/flashattn_mla.py calls it; sgl_kernel/flash_attn.py of
sglang-kernel 0.4.10, with how SGLang 0.5.23's srt/layers/attention/flashattention_backend.py calls it;
flash_attn/cute/interface.py of flash-attn-4 4.0.0b36. Untested on hardware.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kernels import vendor
from kernels.binding import Function, Symbol, Taken
from kernels.mla_decode.compute_units import HOPPER_UNITS, MOST_UNITS
from kernels.mla_decode.layouts import (
    FiniteCache,
    OneToken,
    cache_bytes,
    full_pages,
    one_head,
    one_token,
    parts,
    query_starts,
)
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, ROPE, MlaDecodeSizes
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch


ATTEND = "q k_cache v_cache qv page_table cache_seqlens softmax_scale causal"
SCHEDULED = (
    "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim headdim_v cache_seqlens qkv_dtype "
    "page_size causal"
)

WITH_CACHE = Function("flash_attn_interface.flash_attn_with_kvcache", needs=f"{ATTEND} scheduler_metadata")
SCHEDULE = Function("flash_attn_interface.get_scheduler_metadata", needs=SCHEDULED)

VLLM_VARLEN = Function(
    "vllm.vllm_flash_attn.flash_attn_varlen_func",
    needs="q k v q_v max_seqlen_q cu_seqlens_q max_seqlen_k seqused_k block_table softmax_scale causal "
    "fa_version scheduler_metadata num_splits",
)
VLLM_SCHEDULE = Function(
    "vllm.vllm_flash_attn.get_scheduler_metadata", needs=f"{SCHEDULED} cu_seqlens_q num_splits"
)

SGLANG_WITH_CACHE = Function(
    "sgl_kernel.flash_attn.flash_attn_with_kvcache", needs=f"{ATTEND} cu_seqlens_q max_seqlen_q num_splits"
)

MOST_SPLITS = 128
"""Of FA3's own choice (num_splits_heuristic in hopper/heuristics.h)."""

TILE_HEADS, TILE_TOKENS = 64, 64
"""Of FA3's kernel for MLA (tile_size_fwd_sm90 in hopper/tile_size.h)."""

SPLITS_OF_VLLM = 32
"""Into which vLLM has a sequence split at most where it records graphs
(flash_attn_max_num_splits_for_cuda_graph)."""

FA4_VARLEN = Function(
    "flash_attn.cute.flash_attn_varlen_func",
    needs="q k v qv seqused_k page_table softmax_scale causal",
    wishes="max_seqlen_k num_splits",
)
MLA_PLAN = Symbol("flash_attn.cute.interface._mla_fwd_plan")
"""It splits MLA's sequences where it has that; before, it refuses what it would split."""


class FlashAttentionMlaDecode(vendor.FlashAttention):
    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return need(sizes.kv == "bf16", f"takes a bf16 cache, not {sizes.kv}")


class FlashAttentionFa3MlaDecode(FlashAttentionMlaDecode, vendor.FlashAttention3):
    """`flash_attn_with_kvcache`, its schedule made before timing. With more than 64 heads it multiplies whole
    pages, so that it gets a cache without NaN."""

    name = "flash_attn.fa3"
    requires = "FlashAttention 3 with qv and get_scheduler_metadata (2025-03 or later, from source), sm_90"
    symbols: ClassVar[Sequence[Taken]] = (WITH_CACHE, SCHEDULE)

    def splits(self, sizes: MlaDecodeSizes) -> int:
        """Of a sequence at most, for all of which the call allocates."""
        return most_splits(sizes.heads, max(sizes.lengths()))

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """Partial results, fp32; the cache."""
        rows = sizes.batch * self.splits(sizes) * sizes.heads
        return rows * (LATENT + 1) * 4 + cache_bytes(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _Fa3(operands)


class FlashAttentionFa3OfVllmMlaDecode(vendor.FlashAttentionOfVllm, FlashAttentionFa3MlaDecode):
    """As vLLM ships it and records it into graphs: `flash_attn_varlen_func` over a paged cache, its schedule
    made before, the splits of a sequence limited. Without graphs vLLM sets no limit, as `flash_attn.fa3`."""

    name = "flash_attn.fa3@vllm"
    requires = "vLLM for CUDA (read at 0.33), sm_90"
    symbols = (VLLM_VARLEN, VLLM_SCHEDULE)

    def splits(self, sizes: MlaDecodeSizes) -> int:
        return SPLITS_OF_VLLM

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _Fa3OfVllm(operands)


class FlashAttentionFa3OfSglangMlaDecode(vendor.FlashAttentionOfSglang, FlashAttentionFa3MlaDecode):
    """As SGLang ships and calls it: without a schedule for MLA, which a kernel makes within each call. The
    table has room for the server's context length, by which the call limits the splits of a sequence."""

    name = "flash_attn.fa3@sglang"
    requires = "sglang-kernel (read at 0.4.10), sm_90"
    symbols = (SGLANG_WITH_CACHE,)

    def layout(self, sizes: MlaDecodeSizes) -> int:
        return sizes.batch * math.ceil(sizes.model_len / sizes.page) * 4

    def splits(self, sizes: MlaDecodeSizes) -> int:
        return most_splits(sizes.heads, sizes.model_len)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _Fa3OfSglang(operands)


class _Fa3(OneToken, FiniteCache):
    def __init__(self, operands: MlaDecodeOperands) -> None:
        super().__init__(operands, None)
        table = full_pages(operands, operands.page)
        qv, q = parts(one_token(operands.q))
        v, k = parts(one_head(self.kv))
        self.attend = WITH_CACHE.bind(
            q=q,
            k_cache=k,
            v_cache=v,
            qv=qv,
            cache_seqlens=operands.lengths,
            page_table=table,
            softmax_scale=operands.scale,
            causal=False,
            scheduler_metadata=SCHEDULE.bind(**scheduled(operands, table), num_heads_kv=1)(),
        )

    def call(self) -> None:
        self.answer = self.attend()


class _PackedQuery(FiniteCache):
    """Query tokens behind each other, [batch, heads, 576], as engines have them."""

    answer: torch.Tensor | None = None

    def result(self) -> torch.Tensor:
        assert self.answer is not None, "nothing was called"
        return self.answer


class _Fa3OfVllm(_PackedQuery):
    def __init__(self, operands: MlaDecodeOperands) -> None:
        super().__init__(operands, None)
        table, starts = full_pages(operands, operands.page), query_starts(operands)
        qv, q = parts(operands.q)
        v, k = parts(one_head(self.kv))
        # The schedule is made anew in each step, by the lengths that are there; the call is recorded once.
        given = scheduled(operands, table) | {
            "max_seqlen_k": max(operands.host_lengths),
            "num_heads_kv": 1,
            "cu_seqlens_q": starts,
            "causal": True,
        }
        self.attend = VLLM_VARLEN.bind(
            q=q,
            k=k,
            v=v,
            q_v=qv,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=operands.sizes.model_len,
            seqused_k=operands.lengths,
            block_table=table,
            softmax_scale=operands.scale,
            causal=True,
            fa_version=3,
            scheduler_metadata=VLLM_SCHEDULE.bind(**given, num_splits=SPLITS_OF_VLLM)(),
            num_splits=SPLITS_OF_VLLM,
        )

    def call(self) -> None:
        self.answer = self.attend()


class _Fa3OfSglang(_PackedQuery):
    def __init__(self, operands: MlaDecodeOperands) -> None:
        super().__init__(operands, None)
        qv, q = parts(operands.q)
        v, k = parts(one_head(self.kv))
        self.attend = SGLANG_WITH_CACHE.bind(
            q=q,
            k_cache=k,
            v_cache=v,
            qv=qv,
            page_table=full_pages(operands, operands.page, tokens=operands.sizes.model_len),
            cache_seqlens=operands.lengths,
            cu_seqlens_q=query_starts(operands),
            max_seqlen_q=1,
            softmax_scale=operands.scale,
            causal=True,
            num_splits=0,
        )

    def call(self) -> None:
        self.answer = self.attend()


class Fa4MlaDecode(FlashAttentionMlaDecode, vendor.FlashAttention4):
    """`flash_attn_varlen_func` of the CuTe DSL, which chooses its splits where it can split. It loads whole
    pages, so that it gets a cache without NaN."""

    name = "flash_attn.fa4"
    requires = "FlashAttention 4 (flash-attn-4) with qv, sm_100 or sm_103; it splits from 4.0.0b36"
    archs = vendor.BLACKWELL  # those on which it takes qv
    symbols = (FA4_VARLEN,)

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        heads = need(128 % sizes.heads == 0, f"takes heads that divide 128, not {sizes.heads}")
        return Support.all_of(super().fits(sizes), heads)

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """Partial results, fp32, of splits that fill the device; the cache."""
        rows = (sizes.batch + MOST_UNITS) * sizes.heads
        return rows * (LATENT + 1) * 4 + cache_bytes(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _Fa4(operands)


class _Fa4(OneToken, FiniteCache):
    def __init__(self, operands: MlaDecodeOperands) -> None:
        super().__init__(operands, None)
        qv, q = parts(one_token(operands.q))
        v, k = parts(one_head(self.kv))
        self.attend = FA4_VARLEN.bind(
            q=q,
            k=k,
            v=v,
            qv=qv,
            seqused_k=operands.lengths,
            page_table=full_pages(operands, operands.page),
            softmax_scale=operands.scale,
            causal=False,
            max_seqlen_k=max(operands.host_lengths),
            num_splits=0 if MLA_PLAN.exists() else 1,
        )

    def call(self) -> None:
        self.answer, *_ = self.attend()


def most_splits(heads: int, tokens: int) -> int:
    """FA3's own limit for sequences of so many tokens: what fills an H100 with a single one of them."""
    fills = HOPPER_UNITS // math.ceil(heads / TILE_HEADS)
    return max(1, min(MOST_SPLITS, fills, math.ceil(tokens / TILE_TOKENS)))


def scheduled(operands: MlaDecodeOperands, table: torch.Tensor) -> dict[str, object]:
    """What FA3's schedule is made of, for the longest sequence that the table has room for: the call chooses
    its splits by that."""
    batch, heads = operands.q.shape[:2]
    return {
        "batch_size": batch,
        "max_seqlen_q": 1,
        "max_seqlen_k": table.shape[1] * operands.page,
        "num_heads_q": heads,
        "headdim": ROPE,
        "headdim_v": LATENT,
        "cache_seqlens": operands.lengths,
        "qkv_dtype": operands.q.dtype,
        "page_size": operands.page,
        "causal": False,
    }
