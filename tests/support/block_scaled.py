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


def is_product(
    found: torch.Tensor, left: torch.Tensor, right: torch.Tensor, plus: torch.Tensor | float = 0.0
) -> bool:
    """Whether bf16 values are left @ right.T (+ plus), fp32 operands, within half a unit in their last
    place and what sums of k fp32 terms, which may cancel, lose in any order."""
    wanted = left.double() @ right.double().T + plus
    terms = left.double().abs() @ right.double().abs().T + abs(plus)
    allowed = 2.0**-8 * wanted.abs() + (left.shape[-1] + 4) * 2.0**-24 * terms
    return bool(((found.double() - wanted).abs() <= allowed).all())
