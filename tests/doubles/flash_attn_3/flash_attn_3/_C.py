"""torch.ops.flash_attn_3: hopper/flash_api.cpp at 0251105, mha_fwd (672-1200) and
mha_fwd_get_scheduler_metadata (522-670)."""

import math
import os
from itertools import pairwise

import torch

HALF = (torch.half, torch.bfloat16)


def fwd(q, k, v, qv, cu_q, cu_k, used_k, max_q, max_k, table, descales, scale, causal, meta, splits, pack):
    check(os.environ.get("DOUBLE_ARCH", "sm_90") == "sm_90", "Only Hopper supports different V headdim")
    fp8 = q.dtype == torch.float8_e4m3fn
    check(q.dtype in HALF or fp8, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    check(
        q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    )
    if table is not None:
        check(table.dtype == torch.int32, "page_table must have dtype torch.int32")
    for name, cu, longest in (("cu_seqlens_q", cu_q, max_q), ("cu_seqlens_k", cu_k, max_k)):
        if cu is not None:
            check(cu.is_contiguous() and cu.dtype == torch.int32, f"{name} must be contiguous int32")
            check(longest is not None, f"the longest must be provided if {name} is provided")
    check(cu_k is None or table is None, "If cu_seqlens_k is passed in, then page table is not supported")
    b = len(q) if cu_q is None else len(cu_q) - 1
    h, d = q.shape[-2:]
    h_k, dv = k.shape[-2], v.shape[-1]
    check(
        b == (len(table) if table is not None else len(k) if cu_k is None else len(cu_k) - 1), "batch_size_k"
    )
    check(d <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(h % h_k == 0, "Number of heads in key/value must divide number of heads in query")
    if dv != d:
        wide = 128 < d <= 192 and 96 < dv <= 128
        check(wide or (d <= 64 and dv <= 512), "unsupported pair of Q/K and V headdim")
        check(dv <= 256 or q.dtype in HALF, "HeaddimV > 256 requires fp16 and bf16 data type")
    check(dv <= 256 or d <= 64, "V headdim above 256 needs Q/K headdim at most 64")
    check(q.dim() == (4 if cu_q is None else 3), "q must be [b, s, h, d], or [total, h, d] with cu_seqlens_q")
    check(
        k.dim() == v.dim() == (4 if cu_k is None else 3),
        "k and v must be [b or pages, s, h, d] or [total, h, d]",
    )
    check(v.shape[:-1] == k.shape[:-1] and k.shape[-1] == d, "k and v must go together with q")
    check(table is None or table.dim() == 2, "page_table must be [b, pages]")
    if used_k is not None:
        check(
            used_k.dtype == torch.int32 and used_k.shape == (b,), "seqused_k must have dtype int32, shape [b]"
        )
    elements = 16 if fp8 else 8
    check(d % elements == 0 and dv % elements == 0, f"head sizes should be a multiple of {elements}")
    for name, t in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        if t is not None:  # TMA, or loads of 128 bits
            outer = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
            aligned = t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in outer)
            check(aligned, f"{name}: base and strides must be multiples of 16 bytes")
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

    rows = [i * q.shape[1] for i in range(b + 1)] if cu_q is None else cu_q.tolist()
    longest = q.shape[1] if cu_q is None else max_q
    counts = [e - s for s, e in pairwise(rows)]
    check(max(counts) <= longest, "max_seqlen_q is too small: it decides the mask and the tiles")
    flat, flat_qv = q.reshape(-1, h, d), None if qv is None else qv.reshape(-1, h, dv)
    check(rows == sorted(rows) and rows[-1] <= len(flat), "illegal memory access: cu_seqlens_q is beyond q")
    # :798-803; a single query sees everything
    causal = causal and (longest > 1 or (table is not None and 64 < d <= 128))
    varlen = cu_q is not None or cu_k is not None or used_k is not None
    tiles = _written(meta, b, h // h_k, d, dv, causal, varlen, splits, pack)
    out = torch.full((len(flat), h, dv), math.nan, dtype=torch.bfloat16 if fp8 else q.dtype)
    lse = torch.full((len(flat), h), math.nan)
    for i in range(b):
        at = slice(rows[i], rows[i + 1])
        key, value = _keys(i, k, v, cu_k, used_k, table, max_k)
        query = flat[at].float()
        if fp8:
            query, key, value = (
                t.float() * (1.0 if s is None else s[i].repeat_interleave(t.shape[1] // h_k)[:, None])
                for t, s in zip((query, key, value), descales, strict=True)
            )
        o, log = attend(
            query, None if qv is None else flat_qv[at].float(), key.float(), value.float(), scale, causal
        )
        keep = tiles(i, counts[i])[:, :, None]
        keep = keep.repeat(1, h // keep.shape[1], 1)
        out[at] = torch.where(keep, o, math.nan).to(out.dtype)
        lse[at] = torch.where(keep[..., 0], log, math.nan)
    if cu_q is not None:
        return out, lse.T.contiguous()
    return out.view(b, -1, h, dv), lse.view(b, -1, h).transpose(1, 2).contiguous()


def _keys(i, k, v, cu_k, used_k, table, max_k):
    """One sequence's keys and values, as many as are used; slots beyond are never read."""
    if cu_k is not None:
        begin, end = cu_k[i : i + 2].tolist()
        check(0 <= begin <= end <= len(k), "illegal memory access: cu_seqlens_k is beyond k")
        check(end - begin <= max_k, "max_seqlen_k is too small")
        k, v = k[begin:end], v[begin:end]
        used = end - begin if used_k is None else int(used_k[i])
        check(used <= end - begin, "seqused_k is beyond the sequence")
        return k[:used], v[:used]
    if table is None:
        used = k.shape[1] if used_k is None else int(used_k[i])
        check(used <= k.shape[1], "cache_seqlens is beyond the cache")
        return k[i, :used], v[i, :used]
    page = k.shape[1]
    used = table.shape[1] * page if used_k is None else int(used_k[i])
    check(used <= table.shape[1] * page, "cache_seqlens is beyond the page table")
    token = torch.arange(used)
    pages = table[i][token // page].long()
    check(bool(((pages >= 0) & (pages < len(k))).all()), "illegal memory access: a page beyond the cache")
    return k[pages, token % page], v[pages, token % page]


def attend(q, qv, k, v, scale, causal):
    """out f32 [n, h, dv] and natural lse [n, h] of scale * (q k + qv v), causal bottom right. A row that
    sees no key is zero, its lse -inf (softmax.h:151, epilogue_fwd.hpp:441)."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k)
    if qv is not None:
        scores = scores + torch.einsum("nhd,mhd->hnm", qv, v)
    scores = scores * scale
    if causal:
        hidden = torch.arange(m)[None, :] > torch.arange(n)[:, None] + m - n
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1) if m else torch.full(scores.shape[:2], -math.inf)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v), lse.T


def get_scheduler_metadata(b, max_q, h, h_k, d, dv, dtype, seqused_k, cu_q, page_size, causal, splits, pack):
    """Vectors of batch_rounded int32, then the semaphore: splits, tiles of q, batch of each place, and with
    a causal mask heads in L2 (flash_api.cpp:630-650)."""
    check(
        dtype in (*HALF, torch.float8_e4m3fn),
        "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type",
    )
    check(h % h_k == 0, "Number of heads in key/value must divide number of heads in query")
    check(seqused_k.dtype == torch.int32, "expected scalar type Int")
    check(cu_q is None or cu_q.dtype == torch.int32, "expected scalar type Int")
    check(seqused_k.shape == (b,), "cache_seqlens is read for each of the batch")
    causal = causal and (max_q > 1 or (page_size is not None and 64 < d <= 128))
    rounded = -(-b // 4) * 4
    counts = [max_q] * b if cu_q is None else (cu_q[1:] - cu_q[:-1]).tolist()
    block, packed = _block(d, dv), _packs(pack, h // h_k)
    # flash_prepare_scheduler.cu with Sort: by work, the longest first
    order = sorted(range(b), key=lambda i: -int(seqused_k[i]))
    meta = torch.full(((4 if causal else 3) * rounded + 1,), -1, dtype=torch.int32)
    for place, i in enumerate(order):
        meta[place] = max(splits, 1)
        meta[rounded + place] = -(-counts[i] * (h // h_k if packed else 1) // block)
        meta[2 * rounded + place] = i
        if causal:
            meta[3 * rounded + place] = 1
    meta[-1] = 0
    return meta


def _written(meta, b, group, d, dv, causal, varlen, splits, pack):
    """Which rows [n, h] of a sequence the schedule reaches: all, unless metadata made for others is given."""
    if meta is None or not (varlen or (causal and splits == 1)):  # :995, otherwise it is not looked at
        return lambda i, n: torch.ones(n, 1, dtype=torch.bool)
    check(varlen, "scheduler_metadata of get_scheduler_metadata has another shape where nothing is ragged")
    rounded = -(-b // 4) * 4
    size = (4 if causal else 3) * rounded + 1  # :1003-1007
    check(meta.shape == (size,), f"scheduler_metadata must have shape ({size})")
    check(meta.is_contiguous() and meta.dtype == torch.int32, "scheduler_metadata must be contiguous int32")
    places = meta[2 * rounded : 2 * rounded + b].tolist()
    check(sorted(places) == list(range(b)), "scheduler_metadata is of another batch: illegal memory access")
    tiles = dict(zip(places, meta[rounded : rounded + b].tolist(), strict=True))
    block, packed = _block(d, dv), _packs(pack, group)

    def rows(i, n):
        token, head = torch.arange(n)[:, None], torch.arange(group)[None, :]
        row = token * group + head if packed else token.expand(n, group)
        reached = row < tiles[i] * block
        return reached if packed and group > 1 else reached[:, :1]

    return rows


def _block(d, dv):
    """tile_size.h, tile_size_fwd_sm90: kBlockM."""
    if d <= 64:
        return {512: 64, 256: 128}.get(dv, 192)
    return 192 if d <= 96 else 128


def _packs(pack, group):
    """flash_api.cpp:426, get_pack_gqa, as it comes out for MLA (split, or paged without TMA)."""
    return group > 1 if pack is None else pack


def check(right, message):
    if not right:
        raise RuntimeError(message)
