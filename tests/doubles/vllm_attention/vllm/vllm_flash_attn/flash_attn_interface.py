"""vllm/vllm_flash_attn/flash_attn_interface.py of vLLM 0.33.0: versions 3 and 4; 2 refuses unequal heads.

FA3's C++ is read from vllm-project/flash-attention 617264c (2026-08-06), before vLLM's pin. Untested on
hardware. Not doubled: windows, soft caps, sinks, context parallelism, modifiers, fused FP8 output, FA4's qv.
"""

import os

import torch
from double_arithmetic import flash_attention_3, flash_attention_3_vllm, flash_attention_4
from double_arithmetic.checks import check

DEFAULT_FA_VERSION = 2


def is_fa_version_supported(fa_version: int) -> bool:
    return fa_version_unsupported_reason(fa_version) is None


def fa_version_unsupported_reason(fa_version: int) -> str | None:
    arch = os.environ.get("DOUBLE_ARCH", "sm_90")
    if fa_version == 2:
        return None
    if fa_version == 3:
        return None if arch == "sm_90" else "FA3 is only supported on devices with compute capability 9.x"
    if fa_version == 4:
        known = ("sm_90", *flash_attention_4.BLACKWELL)
        return None if arch in known else "FA4 is only supported on compute capability 9.x, 10.x, or 11.x"
    raise ValueError(f"Unsupported FA version: {fa_version}")


def maybe_contiguous(x):
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


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
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """FA3 alone: int32 [n], whose length follows from the batch, the mask and the splits."""
    _plain(
        *(cu_seqlens_k_new, cache_leftpad, has_softcap or None, max_seqlen_k_new or None, sm_margin or None)
    )
    _plain(None if tuple(window_size) == (-1, -1) else window_size)
    cache_seqlens = maybe_contiguous(cache_seqlens)
    return flash_attention_3_vllm.get_scheduler_metadata(
        *(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v or headdim),
        *(qkv_dtype, cache_seqlens, cu_seqlens_q, page_size, causal, num_splits, pack_gqa),
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size: list[int] | None = None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    num_splits: int = 0,
    output_scale=None,
    fa_version: int = DEFAULT_FA_VERSION,
    s_aux=None,
    cp_world_size=1,
    cp_rank=0,
    cp_tot_seqused_k=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_tensor_leading_dims=None,
    dynamic_causal: torch.Tensor | None = None,
    gather_kv_indices=None,
    gather_kv_valid_length=None,
):
    """q [total_q, h, d], k [total_k, h_k, d] and v [total_k, h_k, dv], or [pages, page, h_k, ...] with
    block_table i32 [b, pages] and seqused_k i32 [b] -> out [total_q, h, dv]; with return_softmax_lse (out,
    natural lse f32 [h, total_q]). q_v: [total_q, h, dv], FA3's MLA. The default scale is d**-0.5, whatever
    q_v. FA3's descales: f32 [b, h_k]; FA4 drops them unless v is FP8."""
    assert cu_seqlens_k is not None or seqused_k is not None, "cu_seqlens_k or seqused_k must be provided"
    assert fa_version == 4 or cu_seqlens_k is None or seqused_k is None, (
        "cu_seqlens_k and seqused_k cannot be provided at the same time"
    )
    assert block_table is None or seqused_k is not None, (
        "seqused_k must be provided if block_table is provided"
    )
    assert output_scale is None or fa_version == 4, "output_scale is only supported by FA4"
    assert window_size is None or len(window_size) == 2
    _plain(alibi_slopes, output_scale, s_aux, mask_mod, block_sparse_tensors, aux_tensors, dynamic_causal)
    _plain(aux_tensor_leading_dims, gather_kv_indices, gather_kv_valid_length, softcap or None)
    _plain(None if window_size is None or tuple(window_size) == (-1, -1) else window_size)
    if cp_world_size != 1 or cp_rank != 0:
        raise NotImplementedError("context parallelism is not doubled")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    q, k, v = (maybe_contiguous(x) for x in (q, k, v))
    torch.empty_like(cu_seqlens_q)
    if fa_version == 2:
        # csrc/flash_attn/flash_api.cpp, mha_varlen_fwd: one head size; q_v is dropped
        check(v.shape == k.shape and k.shape[-1] == q.shape[-1], "v must have shape [..., head_size]")
        raise NotImplementedError("FA2 is not doubled")
    if fa_version == 3:
        if cp_tot_seqused_k is not None:
            check(cp_tot_seqused_k.dtype == torch.int32, "seqused_k must have dtype int32")
            check(cp_tot_seqused_k.shape == (len(cu_seqlens_q) - 1,), "cp_tot_seqused_k must have shape [b]")
        out, softmax_lse = flash_attention_3.fwd(
            q=q,
            k=k,
            v=v,
            qv=q_v,
            cu_q=cu_seqlens_q,
            cu_k=cu_seqlens_k,
            used_k=seqused_k,
            max_q=max_seqlen_q,
            max_k=max_seqlen_k,
            table=block_table,
            descales=(q_descale, k_descale, v_descale),
            scale=softmax_scale,
            causal=causal,
            meta=scheduler_metadata,
            splits=num_splits,
            pack=None,
            reached=flash_attention_3_vllm.reached,
            out=out,
        )
    elif fa_version == 4:
        if q_v is not None:
            raise NotImplementedError("FA4's qv is not doubled: vLLM decodes dense MLA with FA3 alone")
        descales = (q_descale, k_descale, v_descale)
        out, softmax_lse = flash_attention_4.forward(
            *(q, k, v),
            cu_q=cu_seqlens_q,
            cu_k=cu_seqlens_k,
            used_k=seqused_k,
            max_q=max_seqlen_q,
            max_k=max_seqlen_k,
            table=block_table,
            scale=softmax_scale,
            causal=causal,
            splits=num_splits,
            return_lse=return_softmax_lse,
            out=out,
            descales=descales if v.dtype in flash_attention_4.FP8 else (None, None, None),
            widest_on_hopper=512,
            splits_on_hopper=True,
        )
    else:
        raise ValueError(f"Unsupported FA version: {fa_version}")
    return (out, softmax_lse) if return_softmax_lse else out


def _plain(*others):
    if any(o is not None for o in others):
        raise NotImplementedError("this argument is not doubled")
