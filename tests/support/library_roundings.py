"""Roundings and exponentials of libraries, in fp32, beside those of kernels.mistakes."""

import torch

from kernels.attention_mistakes import AttentionOp, Wrong
from kernels.mistakes import Mistake, truncated_to


def truncated(x: torch.Tensor) -> torch.Tensor:
    """To bf16 toward zero."""
    return truncated_to(8, x)


def away(x: torch.Tensor) -> torch.Tensor:
    """To bf16, to nearest, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


def flushed(x: torch.Tensor) -> torch.Tensor:
    """Subnormal numbers as zeros."""
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


def fourteen_bits(x: torch.Tensor) -> torch.Tensor:
    """What Hopper's FP8 products keep of a sum (DeepSeek-V3 technical report, section 3.5.2)."""
    return truncated_to(14, x)


def exp2_fast(x: torch.Tensor) -> torch.Tensor:
    """As ex2.approx.ftz: relative errors of 2^-22, subnormal numbers flushed."""
    return truncated_to(22, flushed(torch.exp2(x)))


def exp2_cubic(x: torch.Tensor) -> torch.Tensor:
    """By a polynomial of degree 3 whose error is 8.8e-5, for what lies between two integers: FlashAttention 4
    computes a part of its exponentials so (flash_attn/cute/utils.py)."""
    x = x.clamp(min=-127.0)
    whole = x.floor()
    rest = x - whole
    cubic = 0.07711909 * rest + 0.22756439
    return torch.ldexp((cubic * rest + 0.69514614) * rest + 1.0, whole.int())


def right(op: AttentionOp, *ways: dict[str, Wrong]) -> tuple[Mistake, ...]:
    """Right calls of attention as mistakes. ways: those of bf16, those that truncate, the same two in FP8"""
    kinds = (("bf16", False), ("bf16", True), ("fp8", False), ("fp8", True))
    return tuple(
        Mistake(name + ", in FP8" * (kind == "fp8"), op.everywhere(way), "core", kind, truncates)
        for (kind, truncates), named in zip(kinds, ways, strict=True)
        for name, way in named.items()
    )
