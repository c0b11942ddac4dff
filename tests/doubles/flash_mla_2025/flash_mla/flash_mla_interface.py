"""flash_mla/flash_mla_interface.py at ebf3064."""

import os

import flash_mla_sm90
import torch


def get_mla_metadata(
    cache_seqlens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tile_scheduler_metadata i32 [sm parts, 8], num_splits i32 [b + 1]) of these lengths; the second
    argument is seq_len_q * num_heads_q // num_heads_k."""
    return flash_mla_sm90.get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | None = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [b, s_q, h_q, 512] and natural lse f32 [b, h_q, s_q]."""
    arch = os.environ.get("DOUBLE_ARCH", "sm_90")
    if arch != "sm_90":
        raise ValueError(f"Unsupported device capability: {arch}")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    return tuple(
        flash_mla_sm90.fwd_kvcache_mla(
            q,
            k_cache,
            head_dim_v,
            cache_seqlens,
            block_table,
            softmax_scale,
            causal,
            tile_scheduler_metadata,
            num_splits,
        )
    )
