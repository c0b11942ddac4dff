"""Roundings of fp32 tensors to what a kernel keeps. All take and return fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch

Round = Callable[[torch.Tensor], torch.Tensor]

E4M3, E4M3FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
OTHER_FP8 = {E4M3: E4M3FNUZ, E4M3FNUZ: E4M3}
"""For each format, the one of other machines, in which the same bits mean about half or twice the value."""


def exact(x: torch.Tensor) -> torch.Tensor:
    return x


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def fp16(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def kept(bits: int, x: torch.Tensor) -> torch.Tensor:
    """Truncates to so many bits of the significand, of which the leading one counts."""
    drop = 24 - bits
    return (x.contiguous().view(torch.int32) >> drop << drop).view(torch.float32)


def fp8(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest. What is too large becomes the largest value of the format."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).float()


def fp8_truncated(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Rounds toward zero."""
    format = torch.finfo(dtype)
    near = fp8(dtype, x)
    lower = fp8(dtype, near - near.abs() * 2.0**-4 * near.sign())
    step = format.smallest_normal / 8
    normal = torch.where(near.abs() > x.abs(), lower, near)
    return torch.where(x.abs() < format.smallest_normal, (x / step).trunc() * step, normal)
