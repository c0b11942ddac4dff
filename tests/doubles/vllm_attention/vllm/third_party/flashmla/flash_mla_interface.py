"""vllm/third_party/flashmla/flash_mla_interface.py of vLLM 0.33.0: dense decoding alone.

The C++ of its pin was not read: deepseek-ai/FlashMLA 9241ae3 stands for it, with the `out` that the interface
adds. Untested on hardware.
"""

import torch
from double_arithmetic.checks import check, one_device
from double_arithmetic.flash_mla import FlashMLASchedMeta, dense_decode_fwd, keep_config


def get_mla_metadata(*args, **kwargs) -> tuple[FlashMLASchedMeta, None]:
    """Takes any argument and reads none; the first call of flash_mla_with_kvcache fills it."""
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
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [b, s_q, h_q, 576] bf16 or fp16, k_cache [blocks, 64, 1, 576] -> out [b, s_q, h_q, 512] (given:
    contiguous, of q's dtype, one key head), natural lse f32 [b, h_q, s_q]."""
    meta = tile_scheduler_metadata
    assert isinstance(meta, FlashMLASchedMeta), "tile_scheduler_metadata must be of type FlashMLASchedMeta"
    assert num_splits is None, "num_splits must be None"
    if indices is not None:
        raise NotImplementedError("the sparse kernels are not doubled")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    kept = {"causal": causal, "is_fp8_kvcache": is_fp8_kvcache}
    keep_config(meta, q, k_cache, **kept, enable_batch_invariant=enable_batch_invariant)
    unused = (attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length)
    assert all(argument is None for argument in unused), "must be None when dense attention is used."
    assert block_table is not None and cache_seqlens is not None, "block_table and cache_seqlens are needed"
    if out is not None:
        check(k_cache.shape[2] == 1, "out: only num_heads_k == 1 is supported")
        check(out.dtype == q.dtype and out.shape == (*q.shape[:3], 512), "out must be like q, of 512")
        check(out.is_contiguous(), "out must be contiguous")
        one_device(q, out)
    found, lse, meta.tile_scheduler_metadata, meta.num_splits = dense_decode_fwd(
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
    return (found if out is None else out.copy_(found)), lse
