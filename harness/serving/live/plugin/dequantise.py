"""Block-scaled FP8 weights as bf16."""

from __future__ import annotations

import torch


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    """bf16[..., N, K] of e4m3fn[..., N, K] and f32[..., ceil(N/128), ceil(K/128)]."""
    n, k = weight.shape[-2:]
    wide = scale.repeat_interleave(block, -2)[..., :n, :].repeat_interleave(block, -1)[..., :k]
    return (weight.float() * wide).bfloat16()
