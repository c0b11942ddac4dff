"""flash_mla/flash_mla_interface.py at 9241ae3: metadata is empty until the first call fills it."""

import torch
from double_arithmetic.flash_mla import FlashMLASchedMeta, dense_decode_fwd, keep_config


def get_mla_metadata(*args, **kwargs) -> tuple[FlashMLASchedMeta, None]:
    """Takes any argument and reads none (for the older interface); the second of the pair is None."""
    return FlashMLASchedMeta(), None


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
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [b, s_q, h_q, 576], k_cache [blocks, 64, 1, 576] -> out [b, s_q, h_q, 512], lse f32 [b, h_q, s_q]
    (natural logarithm). The default scale is 576**-0.5, which is not DeepSeek's."""
    meta = tile_scheduler_metadata
    # same order of checks as the source: the metadata, the number of splits, then the stored configuration
    assert isinstance(meta, FlashMLASchedMeta), "tile_scheduler_metadata must be of type FlashMLASchedMeta"
    assert num_splits is None, "num_splits must be None"
    if indices is not None:
        raise NotImplementedError("the sparse kernels are not doubled")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    keep_config(meta, q, k_cache, causal=causal, is_fp8_kvcache=is_fp8_kvcache)
    unused = (attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length)
    assert all(argument is None for argument in unused), "must be None when dense attention is used."
    assert block_table is not None and cache_seqlens is not None, "block_table and cache_seqlens are needed"
    # is_fp8_kvcache is only compared: the dense kernel below looks at the dtypes
    out, lse, meta.tile_scheduler_metadata, meta.num_splits = dense_decode_fwd(
        q,
        k_cache,
        head_dim_v,
        cache_seqlens,
        block_table,
        softmax_scale,
        causal,
        meta.tile_scheduler_metadata,
        meta.num_splits,
    )
    return out, lse
