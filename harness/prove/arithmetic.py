"""The arithmetic of attention kernels in plain torch: how they round, in which order they sum and split.

Tensors are fp32 and hold what a kernel would: scores [..., keys], values [..., keys, width], where a kernel
that keeps something narrower is emulated by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

Round = Callable[[torch.Tensor], torch.Tensor]
LOG2E = math.log2(math.e)


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


def exp2_cubic(x: torch.Tensor) -> torch.Tensor:
    """By a polynomial of degree 3 whose error is 8.8e-5, for what lies between two integers: FlashAttention 4
    computes a part of its exponentials so (flash_attn/cute/utils.py)."""
    x = x.clamp(min=-127.0)
    whole = x.floor()
    rest = x - whole
    cubic = 0.07711909 * rest + 0.22756439
    return torch.ldexp((cubic * rest + 0.69514614) * rest + 1.0, whole.int())


def exp2_fast(x: torch.Tensor) -> torch.Tensor:
    """As ex2.approx.ftz: relative errors of 2^-22, subnormal numbers flushed."""
    return kept(22, flushed(torch.exp2(x)))


def exp2_linear(x: torch.Tensor) -> torch.Tensor:
    """By a straight line between powers of two, 6 percent high at the most."""
    whole = x.clamp(min=-126.0).floor()
    return torch.ldexp(1.0 + (x.clamp(min=-126.0) - whole), whole.int())


@dataclass(frozen=True)
class Arithmetic:
    """How a kernel attends, block by block, in the log2 domain.

    block:       keys of a step
    weights:     how weights are rounded before the second product
    sums:        how they are rounded before they are summed: by fp32 in most kernels, or as `weights`
    scores, total, accumulator: how these are rounded, the latter two after each step
    headroom:    the largest weight is 2 ** headroom
    lazy:        the maximum is kept until a score exceeds it by so much (log2)
    pairs:       the weights of every other block are rounded again when the next one raises the maximum
    backwards:   the last block comes first
    exp2:        and by what

    Wrong, but for the defaults:
    first_peak:  the maximum before the first step
    has_maximum: whether it is taken off
    of_result, of_total: whether these are rescaled when the maximum rises
    delayed:     values of a step multiply the weights of the step before it
    """

    block: int = 64
    weights: Round = bf16
    sums: Round = exact
    scores: Round = exact
    total: Round = exact
    accumulator: Round = exact
    headroom: float = 0.0
    lazy: float = 0.0
    pairs: bool = False
    backwards: bool = False
    exp2: Round = torch.exp2
    first_peak: float = -math.inf
    has_maximum: bool = True
    of_result: bool = True
    of_total: bool = True
    delayed: bool = False


def attend(
    scores: torch.Tensor,
    values: torch.Tensor,
    how: Arithmetic = Arithmetic(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log2 of the sum of exponentials [..., 1], and the weighted mean of values [..., width]. scores are
    in natural units, -inf where masked."""
    scores = how.scores(scores * LOG2E)
    steps = list(zip(scores.split(how.block, -1), values.split(how.block, -2), strict=True))
    if how.backwards:
        steps.reverse()
    peak = scores.new_full((*scores.shape[:-1], 1), how.first_peak)
    total, result = torch.zeros_like(peak), scores.new_zeros(*scores.shape[:-1], values.shape[-1])
    before: torch.Tensor | None = None
    for number, (part, v) in enumerate(steps):
        highest = peak.maximum(part.amax(-1, keepdim=True))
        if how.lazy:
            highest = torch.where(peak.isinf() | (highest > peak + how.lazy), highest, peak)
        if not how.has_maximum:
            highest = torch.zeros_like(peak)
        base = torch.where(highest == -math.inf, 0.0, highest)
        rescale = how.exp2(torch.where(peak == -math.inf, -math.inf, peak - base)) if number else 0.0 * base
        exponentials = how.exp2(part - base + how.headroom)
        rounded = how.weights(exponentials)
        if how.pairs and number % 2 == 0 and number + 1 < len(steps):
            later = highest.maximum(steps[number + 1][0].amax(-1, keepdim=True))
            back = how.exp2(base - torch.where(later == -math.inf, 0.0, later))
            rounded = torch.where(back > 0, how.weights(rounded * back) / back.clamp(min=1e-30), 0.0)
        total = how.total(total * (rescale if how.of_total else 1.0) + how.sums(exponentials).sum(-1, True))
        used = before[..., : v.shape[-2]] if how.delayed and before is not None else rounded
        result = how.accumulator(result * (rescale if how.of_result else 1.0) + used @ v)
        peak, before = highest, rounded
    return torch.where(peak == -math.inf, 0.0, peak) - how.headroom + total.log2(), result / total


def combine(
    partials: list[tuple[torch.Tensor, torch.Tensor]], partial_results: Round = exact, log_sums: Round = exact
) -> torch.Tensor:
    """Results of parts, weighted by their sums of exponentials."""
    logs = log_sums(torch.stack([log for log, _ in partials]))
    share = (logs - logs.amax(0)).exp2()
    return (share / share.sum(0) * partial_results(torch.stack([result for _, result in partials]))).sum(0)


def split(
    scores: torch.Tensor,
    values: torch.Tensor,
    bounds: list[int],
    how: Arithmetic = Arithmetic(),
    partial_results: Round = exact,
    log_sums: Round = exact,
) -> torch.Tensor:
    """Parts of the keys, which end at these bounds, each by itself and then combined."""
    starts = [0, *bounds[:-1]]
    parts = [
        attend(scores[..., a:b], values[..., a:b, :], how)
        for a, b in zip(starts, bounds, strict=True)
        if b > a
    ]
    return combine(parts, partial_results, log_sums)


def evenly(keys: int, parts: int, unit: int = 1) -> list[int]:
    """Where so many parts of whole units end, of which the last may be shorter; fewer where keys are few."""
    each = math.ceil(math.ceil(keys / parts) / unit) * unit
    return [min(keys, each * (i + 1)) for i in range(math.ceil(keys / each))]


def fourteen_bits(x: torch.Tensor) -> torch.Tensor:
    """What Hopper's FP8 products keep of a sum (DeepSeek-V3 technical report, section 3.5.2)."""
    return kept(14, x)


def rounding_to(dtype: torch.dtype) -> Round:
    return partial(fp8, dtype)
