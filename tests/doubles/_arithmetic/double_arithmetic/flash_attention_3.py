"""FlashAttention 3: hopper/flash_api.cpp, mha_fwd, of Dao-AILab/flash-attention 0251105 (2026-08-15).

SGLang's fork (sgl-project/sgl-flash-attn 10d7867, branch sgl-kernel) adds sinks, vLLM's
(vllm-project/flash-attention 617264c) another scheduler, sinks and context parallelism: what is doubled here
is the same in all three but for the scheduler, which each double brings.
"""

import math
import os
from itertools import pairwise

import torch

from double_arithmetic.attention import attend, keys
from double_arithmetic.checks import aligned, check, one_device

HALF = (torch.half, torch.bfloat16)


def fwd(
    *,
    q,
    k,
    v,
    qv,
    cu_q,
    cu_k,
    used_k,
    max_q,
    max_k,
    table,
    descales,
    scale,
    causal,
    meta,
    splits,
    pack,
    reached,
    out=None,
):
    """out [total, h, dv] and natural lse f32 [h, total], or [b, s, h, dv] and [b, h, s].

    reached(meta, place) of the scheduler says which rows of each sequence are computed: all of them, unless
    metadata of others is given. The rest stays NaN, as torch.empty leaves it.
    """
    check(os.environ.get("DOUBLE_ARCH", "sm_90") == "sm_90", "Only Hopper supports different V headdim")
    fp8 = q.dtype == torch.float8_e4m3fn
    check(q.dtype in HALF or fp8, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    one_device(q, k, v, qv, cu_q, cu_k, used_k, table, meta, out, *descales)
    for t in (q, k, v):
        check(t.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    if table is not None:
        check(table.dtype == torch.int32, "page_table must have dtype torch.int32")
        check(table.stride(-1) == 1, "page_table must have contiguous last dimension")
    for name, cu, longest in (("cu_seqlens_q", cu_q, max_q), ("cu_seqlens_k", cu_k, max_k)):
        if cu is not None:
            check(cu.is_contiguous() and cu.dtype == torch.int32, f"{name} must be contiguous int32")
            check(longest is not None, f"the longest must be provided if {name} is provided")
    check(cu_k is None or table is None, "If cu_seqlens_k is passed in, then page table is not supported")
    b = len(q) if cu_q is None else len(cu_q) - 1
    h, d = q.shape[-2:]
    h_k, dv = k.shape[-2], v.shape[-1]
    b_k = len(table) if table is not None else len(k) if cu_k is None else len(cu_k) - 1
    check(b == b_k, "batch_size must be equal to batch_size_k")
    _check_heads(h, h_k, d, dv, q.dtype)
    check(q.dim() == (4 if cu_q is None else 3), "q must be [b, s, h, d], or [total, h, d] with cu_seqlens_q")
    check(
        k.dim() == v.dim() == (4 if cu_k is None else 3),
        "k and v must be [b or pages, s, h, d] or [total, h, d]",
    )
    check(v.shape[:-1] == k.shape[:-1] and k.shape[-1] == d, "k and v must go together with q")
    check(table is None or table.dim() == 2, "page_table must be [b, pages]")
    if used_k is not None:
        check(used_k.dtype == torch.int32 and used_k.is_contiguous(), "seqused_k must be contiguous int32")
        check(used_k.shape == (b,), "seqused_k must have shape [b]")
    for name, t in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        if t is not None:
            aligned(t, name)
    if qv is not None:
        check(d <= 64 and dv >= 256, "q_v is only supported for head_size <= 64 and hdim_v >= 256")
        check(qv.dtype == q.dtype and q.dtype in HALF, "q_v must have query's dtype, fp16 or bf16")
        check(qv.stride(-1) == 1, "q_v tensor must have contiguous last dimension")
        check(qv.shape == (*q.shape[:-1], dv), "q_v must have shape [..., h, dv]")
    if fp8:
        for t in (t for t in descales if t is not None):  # not given: 1
            check(t.shape == (b, h_k), "descales must have shape [b, h_k], of the key heads")
            check(t.dtype == torch.float32, "expected scalar type Float")
    check(splits <= 256, "num_splits > 256 not supported")
    if out is not None:
        check(out.dtype == (torch.bfloat16 if fp8 else q.dtype), "output must have the same dtype as inputs")
        check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
        check(out.shape == (*q.shape[:-1], dv), "out must have q's shape, of dv")

    rows = [i * q.shape[1] for i in range(b + 1)] if cu_q is None else cu_q.tolist()
    longest = q.shape[1] if cu_q is None else max_q
    counts = [e - s for s, e in pairwise(rows)]
    check(max(counts) <= longest, "max_seqlen_q is too small: it decides the mask and the tiles")
    flat, flat_qv = q.reshape(-1, h, d), None if qv is None else qv.reshape(-1, h, dv)
    check(rows == sorted(rows) and rows[-1] <= len(flat), "illegal memory access: cu_seqlens_q is beyond q")
    if cu_k is not None:
        check(int((cu_k[1:] - cu_k[:-1]).max()) <= max_k, "max_seqlen_k is too small")
    causal = sees_causally(causal, longest, d, table is not None)
    place = {"b": b, "group": h // h_k, "h_k": h_k, "d": d, "dv": dv, "fp8": fp8, "causal": causal}
    place |= {"max_q": longest, "max_k": _max_k(max_k, k, table), "splits": splits, "pack": pack}
    place |= {
        "page": None if table is None else k.shape[1],
        "varlen": cu_q is not None or cu_k is not None or used_k is not None,
    }
    limits = reached(meta, place)
    block = _rows_at_once(place)
    found = torch.full((len(flat), h, dv), math.nan, dtype=torch.bfloat16 if fp8 else q.dtype)
    lse = torch.full((len(flat), h), math.nan)
    for i in range(b):
        at = slice(rows[i], rows[i + 1])
        key, value, spare = keys(i, k, v, cu_k, used_k, table, block)
        query, key, value, spare = (t.float() for t in (flat[at], key, value, spare))
        if fp8:
            query, key, value = (
                t if s is None else t * s[i].repeat_interleave(t.shape[1] // h_k)[:, None]
                for t, s in zip((query, key, value), descales, strict=True)
            )
        o, log = attend(query, None if qv is None else flat_qv[at], key, value, spare, scale, causal)
        keep = limits(i, counts[i])[:, :, None]
        keep = keep.repeat(1, h // keep.shape[1], 1)
        found[at] = torch.where(keep, o, math.nan).to(found.dtype)
        lse[at] = torch.where(keep[..., 0], log, math.nan)
    found = found.view(*q.shape[:-1], dv)
    out = found if out is None else out.copy_(found)
    if cu_q is not None:
        return out, lse.T.contiguous()
    return out, lse.view(b, -1, h).transpose(1, 2).contiguous()


def sees_causally(causal, max_q, d, paged):
    """flash_api.cpp:798-803: a single query sees everything, but for 64 < d <= 128 with pages."""
    return causal and (max_q > 1 or (paged and 64 < d <= 128))


def everything(i, n):
    return torch.ones(n, 1, dtype=torch.bool)


def packed_rows(limit, group, packed):
    """Rows [n, h] below a limit: of tokens, or of tokens times the group's heads where they are packed."""

    def rows(i, n):
        token, head = torch.arange(n)[:, None], torch.arange(group)[None, :]
        row = token * group + head if packed else token.expand(n, group)
        below = row < limit[i]
        return below if packed and group > 1 else below[:, :1]

    return rows


def block_m(d, dv):
    """tile_size.h, tile_size_fwd_sm90: kBlockM."""
    if d <= 64:
        return {512: 64, 256: 128}.get(dv, 192)
    return 192 if d <= 96 else 128


def block_n(d, dv, fp8):
    """tile_size.h, tile_size_fwd_sm90: kBlockN of MLA (64, 512) and of prefill (192, 128); 128 elsewhere."""
    if (d, dv) == (64, 512):
        return 64
    return 160 if fp8 and 128 < d <= 192 else 128


def loads_pages(place):
    """flash_api.cpp:415, get_pagedkv_tma: whether a page is loaded whole, its unused rows with it."""
    rows = place["max_q"] * place["group"]
    whole = place["page"] % block_n(place["d"], place["dv"], place["fp8"]) == 0
    return whole and rows > block_m(place["d"], place["dv"])


def _rows_at_once(place):
    """TMA loads blocks of keys, and what a mask hides is multiplied by P = 0: the main loop clears no V
    (mainloop_fwd_sm90_tma_gmma_ws.hpp). cp.async of single rows fills with zeros (paged_kv.h:264-276)."""
    if place["page"] is not None and not loads_pages(place):
        return None
    return block_n(place["d"], place["dv"], place["fp8"])


def _max_k(max_k, k, table):
    if max_k is not None:
        return max_k
    return k.shape[1] if table is None else table.shape[1] * k.shape[1]


def _check_heads(h, h_k, d, dv, dtype):
    check(d <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(h % h_k == 0, "Number of heads in key/value must divide number of heads in query")
    if dv != d:
        wide = 128 < d <= 192 and 96 < dv <= 128
        check(wide or (d <= 64 and dv <= 512), "unsupported pair of Q/K and V headdim")
        check(dv <= 256 or dtype in HALF, "HeaddimV > 256 requires fp16 and bf16 data type")
    check(dv <= 256 or d <= 64, "V headdim above 256 needs Q/K headdim at most 64")
    elements = 16 if dtype == torch.float8_e4m3fn else 8
    check(d % elements == 0 and dv % elements == 0, f"head sizes should be a multiple of {elements}")
