"""vllm/v1/attention/ops/flashmla.py of vLLM 0.33.0, as v1/attention/backends/mla/flashmla.py imports it."""

import os

import torch
from double_arithmetic.flash_mla_fp8 import fwd_kvcache_mla_fp8, get_mla_decoding_metadata_dense_fp8

from vllm.third_party.flashmla.flash_mla_interface import (
    FlashMLASchedMeta,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_with_kvcache",
    "flash_mla_with_kvcache_fp8",
    "get_mla_metadata",
    "get_mla_metadata_dense_fp8",
    "is_flashmla_dense_supported",
]


def is_flashmla_dense_supported() -> tuple[bool, str | None]:
    if os.environ.get("DOUBLE_ARCH", "sm_90") != "sm_90":
        return False, "FlashMLA Dense is only supported on Hopper devices."
    return True, None


def get_mla_metadata_dense_fp8(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(i32 [sm parts, 8], i32 [b + 1]) of these lengths, for flash_mla_with_kvcache_fp8."""
    return get_mla_decoding_metadata_dense_fp8(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


def flash_mla_with_kvcache_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k_cache e4m3, descales f32 [1] -> out bf16 [b, s_q, h_q, 512], natural lse f32 [b, h_q, s_q]."""
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    out, softmax_lse = fwd_kvcache_mla_fp8(
        q,
        k_cache,
        head_dim_v,
        cache_seqlens,
        block_table,
        softmax_scale,
        causal,
        tile_scheduler_metadata,
        num_splits,
        descale_q,
        descale_k,
    )
    return out, softmax_lse
