"""FP8 operands with block scales for the tests of libraries' doubles: values, scales and their product."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn


def weights(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 values [..., n, k], a scale per 128x128 and their product."""
    *groups, n, k = shape
    values, scale = torch.randn(shape).to(FP8), torch.rand(*groups, -(-n // 128), -(-k // 128)) + 0.5
    full = scale.repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)[..., :k]
    return values, scale, values.float() * full


def activations(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, scale = torch.randn(m, k).to(FP8), torch.rand(m, k // 128) + 0.5
    return values, scale, values.float() * scale.repeat_interleave(128, 1)


def alike(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within what quantising the intermediate to FP8 costs."""
    return bool((got.float() - wanted).norm() < 0.08 * wanted.norm())
