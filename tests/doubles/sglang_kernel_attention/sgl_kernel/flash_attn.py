"""sgl_kernel/flash_attn.py of sglang-kernel 0.4.10.

Its C++ is read from sgl-project/sgl-flash-attn 10d7867 (2026-01-23, branch sgl-kernel), before this wheel.
Untested on hardware. Not doubled: appending keys, rotary embedding, windows, chunks, soft caps, sinks, batch
indices, left padding, only_qv.
"""

import os

import torch
from double_arithmetic.flash_attention_3 import fwd
from double_arithmetic.flash_attention_3_sorted import get_scheduler_metadata as _schedule
from double_arithmetic.flash_attention_3_sorted import reached


def is_fa3_supported(device=None) -> bool:
    return os.environ.get("DOUBLE_ARCH", "sm_90") in ("sm_80", "sm_86", "sm_89", "sm_90")


def maybe_contiguous(x):
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk: int | None = None,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    only_qv=False,
    sm_margin=0,
    return_softmax_lse=False,
    sinks=None,
    score_mod=None,
    aux_tensors=None,
    ver=3,
    out=None,
):
    """MLA: q [total_q, h, 64], qv [total_q, h, 512], k_cache [pages, page, 1, 64], v_cache [pages, page, 1,
    512] -> out [total_q, h, 512], or [b, s, h, ...] without cu_seqlens_q; with return_softmax_lse (out,
    natural lse, ...). ver, score_mod and aux_tensors are not read; cu_seqlens_k_new neither, without k."""
    _plain(k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, rotary_seqlens, sinks)
    _plain(only_qv or None, attention_chunk or None, softcap or None)
    _plain(None if tuple(window_size) == (-1, -1) else window_size)
    if v_cache is None or k_cache is None:
        raise ValueError("k_cache and v_cache must be provided")
    if q is None:
        raise ValueError("q can only be None when only_qv=True")
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    if softmax_scale is None:
        softmax_scale = (q.shape[-1] + (qv.shape[-1] if qv is not None else 0)) ** (-0.5)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=v_cache.device)
    out, lse = fwd(
        q=maybe_contiguous(q),
        k=k_cache,
        v=v_cache,
        qv=qv,
        cu_q=maybe_contiguous(cu_seqlens_q),
        cu_k=None,
        used_k=cache_seqlens,
        max_q=max_seqlen_q,
        max_k=None,
        table=maybe_contiguous(page_table),
        descales=(q_descale, k_descale, v_descale),
        scale=float(softmax_scale),
        causal=causal,
        meta=scheduler_metadata,
        splits=num_splits,
        pack=pack_gqa,
        reached=reached,
        out=out,
    )
    return (out, lse, None, None) if return_softmax_lse else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    only_qv=False,
    sm_margin=0,
    return_softmax_lse=False,
    sinks=None,
    score_mod=None,
    aux_tensors=None,
    ver=3,
    out=None,
):
    """q [total_q, h, d], k [total_k, h_k, d], v [total_k, h_k, dv] -> out [total_q, h, dv] (bf16 of e4m3);
    with return_softmax_lse (out, natural lse f32 [h, total_q], ...). Strides are taken as they are.
    page_table, ver, score_mod and aux_tensors are not read."""
    if not is_fa3_supported():
        raise NotImplementedError("flash_attn at sgl-kernel is only supported on sm90 and above")
    if max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError("max_seqlen_q and max_seqlen_k are required for FA3")
    _plain(seqused_q, sinks, only_qv or None, attention_chunk or None, softcap or None)
    _plain(None if tuple(window_size) == (-1, -1) else window_size)
    if softmax_scale is None:
        softmax_scale = (q.shape[-1] + (qv.shape[-1] if qv is not None else 0)) ** (-0.5)
    out, lse = fwd(
        q=q,
        k=k,
        v=v,
        qv=qv,
        cu_q=cu_seqlens_q,
        cu_k=cu_seqlens_k,
        used_k=seqused_k,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        table=None,
        descales=(q_descale, k_descale, v_descale),
        scale=float(softmax_scale),
        causal=causal,
        meta=None,
        splits=num_splits,
        pack=pack_gqa,
        reached=reached,
        out=out,
    )
    return (out, lse, None, None) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype=torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size=(-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
):
    """int32 [(3, or 4 if causal and max_seqlen_q > 1) * (batch rounded up to 4) + 1]."""
    _plain(cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, max_seqlen_k_new or None, sm_margin or None)
    _plain(attention_chunk or None, has_softcap or None)
    _plain(None if tuple(window_size) == (-1, -1) else window_size)
    return _schedule(
        *(batch_size, max_seqlen_q, num_heads, num_heads_k, headdim, headdim_v or headdim, qkv_dtype),
        *(maybe_contiguous(cache_seqlens), cu_seqlens_q, page_size, causal, num_splits, pack_gqa),
    )


def _plain(*others):
    if any(o is not None for o in others):
        raise NotImplementedError("this argument is not doubled")
