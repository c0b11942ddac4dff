"""flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp, mha_varlen_fwd, at 0251105.

One head size for q, k and v: DeepSeek's 192/128 needs v padded to 192, and out cut back to 128.
"""

import math
from itertools import pairwise

import torch


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """q [total_q, h, d], k and v [total_k, h_k, d] -> out [total_q, h, d]; with return_attn_probs
    (out, natural lse f32 [h, total_q], None). Causal is aligned to the bottom right."""
    plain = dropout_p == 0.0 and tuple(window_size) == (-1, -1) and softcap == 0.0
    plain = plain and alibi_slopes is None and block_table is None
    if not plain:
        raise NotImplementedError("dropout, windows, soft caps, slopes and block tables are not doubled")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)  # of the size that it is given: of 192 where v is padded
    # FlashAttnVarlenFunc.forward pads head sizes to a multiple of 8; the double has no use for that
    check(q.shape[2] % 8 == 0, "head_size must be a multiple of 8 (padding is not doubled)")
    q, k, v = (x.contiguous() if x.stride(-1) != 1 else x for x in (q, k, v))  # _flash_attn_varlen_forward
    # flash_api.cpp:574-660
    check(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check(t.dtype == torch.int32, f"{name} must have dtype int32")
        check(t.is_contiguous(), f"{name} must be contiguous")
    b = cu_seqlens_q.numel() - 1
    check(q.dim() == k.dim() == v.dim() == 3, "q, k and v must have 3 dimensions")
    (total_q, h, d), (total_k, h_k, _) = q.shape, k.shape
    check(b > 0, "batch size must be positive")
    check(d <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(h % h_k == 0, "Number of heads in key/value must divide number of heads in query")
    check(k.shape == (total_k, h_k, d), f"k must have shape ({total_k}, {h_k}, {d})")
    check(v.shape == (total_k, h_k, d), f"v must have shape ({total_k}, {h_k}, {d})")
    check(cu_seqlens_q.shape == cu_seqlens_k.shape == (b + 1,), "cu_seqlens must have shape (b + 1)")
    for name, t in (("q", q), ("k", k), ("v", v)):  # loads of 128 bits
        aligned = t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        check(aligned, f"{name}: misaligned address")
    rows, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for name, t, total in (("cu_seqlens_q", rows, total_q), ("cu_seqlens_k", keys, total_k)):
        check(
            t == sorted(t) and t[0] >= 0 and t[-1] <= total,
            f"illegal memory access: {name} beyond its tensor",
        )
    # the grid and, at 1, the mask are made for max_seqlen_q (flash_api.cpp:615): longer rows are not computed
    check(max_seqlen_q >= max(e - s for s, e in pairwise(rows)), "max_seqlen_q is too small")
    check(max_seqlen_k >= max(e - s for s, e in pairwise(keys)), "max_seqlen_k is too small")
    out = torch.full_like(q, math.nan)
    lse = torch.full((h, total_q), math.nan)
    for i in range(b):
        at, seen = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])
        o, log = attend(q[at], k[seen], v[seen], softmax_scale, causal)
        out[at], lse[:, at] = o.to(out.dtype), log
    return (out, lse, None) if return_attn_probs else out


def attend(q, k, v, scale, causal):
    """q [n, h, d], k and v [m, h_k, d] -> out f32 [n, h, d], natural lse [h, n]; key j is hidden from query i
    where j > i + m - n (docstring of flash_attn_varlen_func). A row that sees no key is zero, its lse +inf
    (csrc/flash_attn/src/softmax.h, normalize_softmax_lse)."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    if causal:
        hidden = torch.arange(m)[None, :] > torch.arange(n)[:, None] + m - n
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1) if m else torch.full(scores.shape[:2], -math.inf)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v), torch.where(lse == -math.inf, math.inf, lse)


def check(right, message):
    if not right:
        raise RuntimeError(message)
