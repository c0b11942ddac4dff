"""Roundings, of fp32 tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

Round = Callable[[torch.Tensor], torch.Tensor]


def exact(x: torch.Tensor) -> torch.Tensor:
    return x


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def fp16(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def truncated(x: torch.Tensor) -> torch.Tensor:
    """To bf16 toward zero."""
    return (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32)


def away(x: torch.Tensor) -> torch.Tensor:
    """To bf16, to nearest, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


def kept(bits: int, x: torch.Tensor) -> torch.Tensor:
    """So many bits of the significand, the first included, toward zero."""
    drop = 24 - bits
    return (x.contiguous().view(torch.int32) >> drop << drop).view(torch.float32)


def fp8(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """To nearest; what is too large becomes the largest."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).float()


def fp8_truncated(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Toward zero."""
    near = fp8(dtype, x)
    step = torch.where(x.abs() >= torch.finfo(dtype).tiny, near.abs() * 2.0**-4, 0.0)
    lower = fp8(dtype, near - step * near.sign())
    subnormal = (x / torch.finfo(dtype).smallest_normal * 8).trunc() * torch.finfo(dtype).smallest_normal / 8
    down = torch.where(near.abs() > x.abs(), lower, near)
    return torch.where(x.abs() < torch.finfo(dtype).tiny, subnormal, down)


def flushed(x: torch.Tensor) -> torch.Tensor:
    """Subnormal numbers as zeros."""
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


def fourteen_bits(x: torch.Tensor) -> torch.Tensor:
    """What Hopper's FP8 products keep of a sum (DeepSeek-V3 technical report, section 3.5.2)."""
    return kept(14, x)
