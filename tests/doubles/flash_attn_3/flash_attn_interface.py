"""Double of Dao-AILab/flash-attention 0251105 (2026-08-15), FA3: hopper/flash_attn_interface.py, sm_90.

Not doubled: appending keys, rotary embedding, windows, chunks, soft caps, batch indices, left padding.
"""

import torch
from flash_attn_3 import _C


def maybe_contiguous(x):
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
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
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """q [total_q, h, d], k [total_k, h_k, d], v [total_k, h_k, dv] -> out [total_q, h, dv] (bf16 of e4m3);
    with return_attn_probs (out, natural lse f32 [h, total_q]). descales: f32 [b, h_k]."""
    _plain(window_size, attention_chunk, softcap, seqused_q)
    if softmax_scale is None:
        softmax_scale = (q.shape[-1] + (qv.shape[-1] if qv is not None else 0)) ** (-0.5)
    out, lse = _forward(
        *(q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, None),
        *((q_descale, k_descale, v_descale), softmax_scale, causal, None, num_splits, pack_gqa),
    )
    return (out, lse) if return_attn_probs else out


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
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """MLA: q [b, s, h, 64], qv [b, s, h, 512], k_cache [pages, page, 1, 64], v_cache [pages, page, 1, 512]
    -> out [b, s, h, 512]; with return_softmax_lse (out, natural lse f32 [b, h, s], ...)."""
    _plain(window_size, attention_chunk, softcap, k, v, rotary_cos, rotary_sin, rotary_seqlens)
    _plain((-1, -1), 0, 0.0, cache_batch_idx, cache_leftpad, cu_seqlens_k_new)
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    if softmax_scale is None:
        softmax_scale = (q.shape[-1] + (qv.shape[-1] if qv is not None else 0)) ** (-0.5)
    if cache_seqlens is not None and isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    out, lse = _forward(
        *(q, k_cache, v_cache, qv, cu_seqlens_q, None, cache_seqlens, max_seqlen_q, None, page_table),
        *((q_descale, k_descale, v_descale), softmax_scale, causal, scheduler_metadata, num_splits, pack_gqa),
    )
    # the real one appends its partial results of a split
    return (out, lse, None, None) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens: torch.Tensor,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """int32 [(3, or 4 if causal and max_seqlen_q > 1) * (batch rounded up to 4) + 1]."""
    _plain(window_size, attention_chunk, float(has_softcap), cu_seqlens_k_new, cache_leftpad)
    cache_seqlens = maybe_contiguous(cache_seqlens)
    return _C.get_scheduler_metadata(
        *(batch_size, max_seqlen_q, num_heads_q, num_heads_kv, headdim, headdim_v or headdim, qkv_dtype),
        *(cache_seqlens, cu_seqlens_q, page_size, causal, num_splits, pack_gqa),
    )


def _forward(
    q, k, v, qv, cu_q, cu_k, used_k, max_q, max_k, page_table, descales, scale, causal, meta, splits, pack
):
    """_flash_attn_forward (hopper/flash_attn_interface.py:97-106): what it makes contiguous."""
    q, k = maybe_contiguous(q), maybe_contiguous(k)
    v = v.contiguous() if v.stride(-1) != 1 and v.stride(-3) != 1 else v
    cu_q, cu_k, used_k, page_table = (maybe_contiguous(t) for t in (cu_q, cu_k, used_k, page_table))
    return _C.fwd(
        q=q,
        k=k,
        v=v,
        qv=qv,
        cu_q=cu_q,
        cu_k=cu_k,
        used_k=used_k,
        max_q=max_q,
        max_k=max_k,
        table=page_table,
        descales=descales,
        scale=float(scale),
        causal=causal,
        meta=meta,
        splits=splits,
        pack=pack,
        reached=_C.reached,
    )


def _plain(window_size, attention_chunk, softcap, *others):
    plain = tuple(window_size) == (-1, -1) and attention_chunk == 0 and softcap == 0.0
    if not plain or any(o is not None for o in others):
        raise NotImplementedError("this argument is not doubled")
