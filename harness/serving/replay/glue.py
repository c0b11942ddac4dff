"""Glue between the suite's ops in a layer: norms, rotary embedding, router, absorbed products.

In torch, or by vLLM's own operators where its CPU build is installed, as the engine there runs those. Glue is
the same in all arms: it is there for the caches and the time it takes, and its speed is no claim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


Call = Callable[[], None]
EPSILON = 1e-6


@functools.cache
def engine_operators(kind: str) -> Any:
    """vLLM's operators of the CPU build, or None."""
    if kind != "cpu":
        return None
    try:
        import torch
        import vllm._custom_ops  # noqa: F401
    except ImportError:
        return None
    return torch.ops._C if hasattr(torch.ops._C, "fused_add_rms_norm") else None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = x / rms(x) * weight, by row."""
    ops = engine_operators(x.device.type)
    if ops is not None and x.is_contiguous():
        ops.rms_norm(out, x, weight, EPSILON)
        return
    import torch

    out.copy_(torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPSILON))


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """residual += x; out = its norm."""
    residual.add_(x)
    rms_norm(residual, weight, out)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(first half of a row) * second half."""
    ops = engine_operators(x.device.type)
    if ops is not None and x.is_contiguous():
        ops.silu_and_mul(out, x)
        return
    import torch

    gate, up = x.chunk(2, -1)
    torch.mul(torch.nn.functional.silu(gate), up, out=out)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, 64] turned by cos, sin [tokens, 1, 32]; neighbours are a pair, as in DeepSeek."""
    import torch

    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def angles(positions: torch.Tensor, theta: float = 10000.0, width: int = 64) -> tuple[Any, Any]:
    """bf16 cos and sin [tokens, 1, width / 2]."""
    import torch

    frequency = theta ** (-torch.arange(0, width, 2, device=positions.device) / width)
    turned = positions[:, None, None] * frequency
    return turned.cos().bfloat16(), turned.sin().bfloat16()
