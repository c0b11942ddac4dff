"""sglang/kernels/ops/attention/flash_mla_interface.py of SGLang 0.5.23, which srt/layers/attention/
flashmla_backend.py calls: dense decoding alone."""

import flash_mla
import torch
from flash_mla.flash_mla_interface import FlashMLASchedMeta


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor | FlashMLASchedMeta, torch.Tensor | None]:
    """Without cache_seqlens (an empty FlashMLASchedMeta, None); with it (i32 [sm parts, 8], i32 [b + 1])."""
    if cache_seqlens is None:
        return flash_mla.get_mla_metadata()[0], None
    assert num_q_tokens_per_head_k is not None
    assert num_heads_k is not None
    return flash_mla.get_mla_decoding_metadata(
        *(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk),
        use_legacy=True,
    )


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | FlashMLASchedMeta,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    kv_format: str | None = None,
    *,
    use_legacy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The call of sgl-flash-mla with use_legacy=True. With tensors for metadata, is_fp8_kvcache follows from
    q's dtype and num_splits goes with them; with a FlashMLASchedMeta it must be said."""
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        assert num_splits is None, "num_splits must be None with FlashMLASchedMeta"
        sched_meta = tile_scheduler_metadata
    else:
        assert use_legacy, "tensor scheduling metadata exists only for the legacy kernels"
        assert num_splits is not None
        assert block_table is not None and cache_seqlens is not None
        extras = (attn_sink, extra_k_cache, extra_indices_in_kvcache)
        assert all(x is None for x in extras), "attn_sink and extra caches need FlashMLASchedMeta"
        assert (descale_q is None) == (descale_k is None), "descales should be both None or both not None"
        sched_meta = FlashMLASchedMeta(tile_scheduler_metadata=tile_scheduler_metadata, num_splits=num_splits)
        if indices is None:
            is_fp8_kvcache = q.element_size() == 1
    return flash_mla.flash_mla_with_kvcache(
        q=q,
        k_cache=k_cache,
        block_table=block_table,
        cache_seqlens=cache_seqlens,
        head_dim_v=head_dim_v,
        tile_scheduler_metadata=sched_meta,
        softmax_scale=softmax_scale,
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
        use_legacy=use_legacy,
        kv_format=kv_format,
        descale_q=descale_q,
        descale_k=descale_k,
    )
