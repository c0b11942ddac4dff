"""flash_attn/cute/interface.py at 0251105: flash_attn_varlen_func (3419) over _flash_attn_fwd (521-1560).

Not doubled: gathered keys, windows, sinks, soft caps, modifiers, block sparsity, scheduler metadata.
"""

import math
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None,
    mask_mod: Callable | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
):
    """Always a pair: (out [total_q, h, dv], natural lse f32 [h, total_q], with qv [total_q, h]; None unless
    return_lse or a gradient is asked for). q, k, v: [total, h, d], or [b, s, h, d] without cu_seqlens."""
    undoubled = (gather_kv_indices, learnable_sink, score_mod, score_mod_bwd, mask_mod, block_sparse_tensors)
    undoubled += (aux_tensors, aux_scalars, scheduler_metadata, seqlen_k_per_split, seqused_q)
    if any(a is not None for a in undoubled) or tuple(window_size) != (None, None) or softcap != 0.0:
        raise NotImplementedError("this argument is not doubled")
    # maybe_contiguous (cute_dsl_utils.py:87) copies what is not aligned: strides are free, and cost a kernel
    h, d = q.shape[-2:]
    h_k, dv = v.shape[-2:]
    b = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if page_table is not None:
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert page_table.dtype == torch.int32, "page_table must be int32"
        assert page_table.shape == (b, page_table.shape[1])
    assert k.shape == (*v.shape[:-1], d), "k and v must go together"
    assert v.dim() == (4 if cu_seqlens_k is None else 3)
    assert cu_seqlens_k is not None or page_table is not None or len(v) == b
    assert cu_seqlens_k is None or cu_seqlens_k.shape == (b + 1,), (
        "cu_seqlens_k must have shape (batch_size + 1,)"
    )
    assert seqused_k is None or seqused_k.shape == (b,), "seqused_k must have shape (batch_size,)"
    fp8 = v.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    assert fp8 or v.dtype in (torch.float16, torch.bfloat16), "inputs must be float16, bfloat16 or fp8"
    assert all(t is None or t.dtype == v.dtype for t in (q, k, qv)), (
        "q, k, v, and qv must have the same dtype"
    )
    for t in (t for t in (cu_seqlens_q, cu_seqlens_k, seqused_k) if t is not None):
        assert t.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be int32"
        assert t.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be contiguous"
    assert h % h_k == 0, "num_head must be divisible by num_head_kv"
    arch = os.environ.get("DOUBLE_ARCH", "sm_90")
    _validate_head_dims(d, dv, arch, 16 // v.element_size())
    # :783; the public function has no descales at all: e4m3 is read at a scale of 1
    assert not fp8 or arch == "sm_100", (
        "FP8 is only supported on SM100 (compute capability 10.x) for FA4 CuTe."
    )
    if softmax_scale is None:
        softmax_scale = (d if qv is None else d + dv) ** -0.5
    if qv is not None:  # :893-905
        assert arch == "sm_100", "only support Blackwell arch with qv"
        assert qv.shape == (*q.shape[:-1], dv) and dv == 512 and d == 64
        assert num_splits <= 1, "split kv not supported with qv"

    rows = [i * q.shape[1] for i in range(b + 1)] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    flat, flat_qv = q.reshape(-1, h, d), None if qv is None else qv.reshape(-1, h, dv)
    check(rows == sorted(rows) and rows[-1] <= len(flat), "cu_seqlens_q is beyond q")
    longest = max(e - s for s, e in pairwise(rows))
    # is_static_persistent follows from max_seqlen_q: longer rows would not be computed
    check(max_seqlen_q is None or longest <= max_seqlen_q, "max_seqlen_q is too small")
    out = torch.full((len(flat), h, dv), math.nan, dtype=torch.bfloat16 if fp8 else q.dtype)
    lse = torch.full((len(flat), h), math.nan)
    for i in range(b):
        at = slice(rows[i], rows[i + 1])
        key, value = _keys(i, k, v, cu_seqlens_k, seqused_k, page_table)
        check(max_seqlen_k is None or len(key) <= max_seqlen_k, "max_seqlen_k is too small")
        o, log = attend(flat[at], None if qv is None else flat_qv[at], key, value, softmax_scale, causal)
        out[at], lse[at] = o.to(out.dtype), log
    out = out.view(*q.shape[:-1], dv)
    if not return_lse and not any(t.requires_grad for t in (q, k, v)):
        return out, None
    if qv is not None:
        return out, lse.view(q.shape[:-1])
    return out, lse.view(*q.shape[:-1]).transpose(-1, -2).contiguous()


def _validate_head_dims(d, dv, arch, alignment):
    """:112-129."""
    aligned = d % alignment == 0 and dv % alignment == 0
    if arch == "sm_90":
        assert 8 <= d <= 256 and 8 <= dv <= 256 and aligned, f"({d}, {dv}) is not supported on SM90."
    else:
        absorbed = (d == 64 or d == dv) and dv == 512
        plain = 8 <= d <= 128 and 8 <= dv <= 128
        right = plain or absorbed or (d, dv) in ((192, 128), (256, 256))
        assert right and aligned, f"({d}, {dv}) is not supported on SM100/SM110."


def _keys(i, k, v, cu_k, used_k, table):
    if cu_k is not None:
        begin, end = cu_k[i : i + 2].tolist()
        check(0 <= begin <= end <= len(k), "cu_seqlens_k is beyond k")
        used = end - begin if used_k is None else int(used_k[i])
        check(used <= end - begin, "seqused_k is beyond the sequence")
        return k[begin : begin + used], v[begin : begin + used]
    if table is None:
        used = k.shape[1] if used_k is None else int(used_k[i])
        check(used <= k.shape[1], "seqused_k is beyond the keys")
        return k[i, :used], v[i, :used]
    page = k.shape[1]
    used = table.shape[1] * page if used_k is None else int(used_k[i])
    check(used <= table.shape[1] * page, "seqused_k is beyond the page table")
    token = torch.arange(used)
    pages = table[i][token // page].long()
    check(bool(((pages >= 0) & (pages < len(k))).all()), "a page beyond the cache")
    return k[pages, token % page], v[pages, token % page]


def attend(q, qv, k, v, scale, causal):
    """out f32 [n, h, dv], natural lse [n, h] of scale * (q k + qv v); key j is hidden from query i where
    j > i + m - n (mask.py, causal_row_offset). A row that sees no key is zero."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k)
    if qv is not None:
        scores = scores + torch.einsum("nhd,mhd->hnm", qv.float(), v)
    scores = scores * scale
    if causal:
        hidden = torch.arange(m)[None, :] > torch.arange(n)[:, None] + m - n
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1) if m else torch.full(scores.shape[:2], -math.inf)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v), lse.T


def check(right, message):
    if not right:
        raise RuntimeError(f"CUDA error: {message}")
