"""flash_attn/cute/interface.py of flash-attn-4 4.0.0b36: flash_attn_varlen_func (4214) over _flash_attn_fwd
(678). What is not doubled stands in `double_arithmetic.flash_attention_4`. Untested on hardware."""

from collections.abc import Callable
from typing import Any

import torch
from double_arithmetic.flash_attention_4 import forward


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
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
):
    """Always a pair: (out [total_q, h, dv], natural lse f32 [h, total_q], with qv [total_q, h]; None unless
    return_lse or a gradient is asked for). q, k, v: [total, h, d], or [b, s, h, d] without cu_seqlens.

    num_splits 0 lets the kernel choose. There are no descales: FP8 is read at a scale of 1.
    """
    _plain(gather_kv_indices, score_mod_bwd, aux_scalars, gather_bwd_token_chunk)
    window = {"window_size_left": window_size[0], "window_size_right": window_size[1]}
    return _flash_attn_fwd(
        *(q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k),
        *(min_seqlen_k, page_table, softmax_scale, causal, softcap),
        **window,
        learnable_sink=learnable_sink,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        return_lse=return_lse,
        aux_tensors=aux_tensors,
        scheduler_metadata=scheduler_metadata,
        seqlen_k_per_split=seqlen_k_per_split,
    )[:2]


def _flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: torch.Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,
    mma_pv_is_rs: bool | None = None,
    intra_wg_overlap: bool | None = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
):
    """(out, lse, None, None, None). descales: f32 [b, h_k], for FP8 alone; with qv those of k and v are one
    tensor."""
    _plain(
        seqused_q, window_size_left, window_size_right, learnable_sink, tile_mn, _arch, score_mod, mask_mod
    )
    _plain(block_sparse_tensors, lse, aux_tensors, aux_scalars, gather_kv_indices, scheduler_metadata)
    _plain(seqlen_k_per_split, softcap or None)
    found = forward(
        *(q, k, v),
        qv=qv,
        cu_q=cu_seqlens_q,
        cu_k=cu_seqlens_k,
        used_k=seqused_k,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        table=page_table,
        scale=softmax_scale,
        causal=causal,
        splits=num_splits,
        return_lse=return_lse,
        out=out,
        descales=(q_descale, k_descale, v_descale),
    )
    return *found, None, None, None


def _plain(*others):
    if any(o is not None for o in others):
        raise NotImplementedError("this argument is not doubled")
