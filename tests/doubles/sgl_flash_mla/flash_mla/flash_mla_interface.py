"""flash_mla/flash_mla_interface.py and _loader.py of sgl-flash-mla 1.0.0: dense decoding is on the legacy
side, which a wheel has unless it was built with FLASH_MLA_BUILD_LEGACY=0."""

import math

import torch
from double_arithmetic.checks import check
from double_arithmetic.flash_mla import BLOCK, SMS, FlashMLASchedMeta, block_schedule, dense_decode_fwd
from double_arithmetic.flash_mla_fp8 import fwd_kvcache_mla_fp8, get_mla_decoding_metadata_dense_fp8


def has_legacy() -> bool:
    return True


def get_mla_metadata(*args, **kwargs) -> tuple[FlashMLASchedMeta, None]:
    """Takes any argument and reads none; the first decode call fills it, but for dense FP8."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tile_scheduler_metadata i32 [sm parts, 8], num_splits i32 [b + 1]), to be assigned to a
    FlashMLASchedMeta. num_q_tokens_per_head_k: seq_len_q * num_heads_q // num_heads_k."""
    if topk is not None:
        raise NotImplementedError("the sparse kernels are not doubled")
    if is_fp8_kvcache:
        assert use_legacy, "dense fp8 decoding exists only on the legacy side"
        return tuple(get_mla_decoding_metadata_dense_fp8(seqlens_k, num_q_tokens_per_head_k, h_k))
    if not use_legacy:
        raise NotImplementedError(
            "the current kernels have no dense decoding; their scheduler is not doubled"
        )
    # csrc/python_api.cpp of sgl-project/FlashMLA, branch rebase (2026-05-21)
    check(seqlens_k.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(seqlens_k.is_contiguous(), "seqlens_k must be contiguous")
    heads = h_k * num_q_tokens_per_head_k if h_q is None else h_q
    s_q = max(1, num_q_tokens_per_head_k // max(1, heads // h_k))
    parts = max(SMS // h_k // math.ceil(s_q * heads // h_k / BLOCK), 1)
    return block_schedule(seqlens_k.tolist(), parts)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [b, s_q, h_q, 576] bf16 or e4m3, k_cache [blocks, 64, 1, 576] alike -> out [b, s_q, h_q, 512] (bf16
    of e4m3), natural lse f32 [b, h_q, s_q]. FP8 needs is_fp8_kvcache=True, filled metadata and both descales,
    f32 [1]. The dense side reads neither sinks, extra caches nor enable_batch_invariant."""
    meta = tile_scheduler_metadata
    assert isinstance(meta, FlashMLASchedMeta), "tile_scheduler_metadata must be of type FlashMLASchedMeta"
    assert num_splits is None, "num_splits must be None"
    if indices is not None:
        raise NotImplementedError("the sparse kernels are not doubled")
    assert use_legacy, "Sparse attention is required: pass use_legacy=True to reach dense MLA decoding"
    assert kv_format is None, "kv_format does not apply to dense decoding"
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    given = (q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal)
    if is_fp8_kvcache:
        assert meta.tile_scheduler_metadata is not None, (
            "dense fp8 decoding needs metadata from get_mla_decoding_metadata(..., is_fp8_kvcache=True)"
        )
        return fwd_kvcache_mla_fp8(
            *given, meta.tile_scheduler_metadata, meta.num_splits, descale_q, descale_k
        )
    assert descale_q is None and descale_k is None, "descale_q/descale_k apply to the dense fp8 path only"
    out, lse, meta.tile_scheduler_metadata, meta.num_splits = dense_decode_fwd(
        *given, meta.tile_scheduler_metadata, meta.num_splits
    )
    return out, lse
