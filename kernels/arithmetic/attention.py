"""Attention as kernels compute it, right and wrong: keys block by block, in parts that are combined.

Tensors are fp32: scores [..., keys], values [..., keys, width]. Sums of exponentials are given as their log2
[..., 1]. What a kernel keeps in a narrower format is rounded to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.arithmetic.roundings import Round, bf16, exact

LOG2E = math.log2(math.e)
Partial = tuple[torch.Tensor, torch.Tensor]
"""Of some of the keys: the log2 of the sum of exponentials [..., 1], and their result [..., width]."""


def exp2_linear(x: torch.Tensor) -> torch.Tensor:
    """By a straight line between powers of two, 6 percent high at the most."""
    whole = x.clamp(min=-126.0).floor()
    return torch.ldexp(1.0 + (x.clamp(min=-126.0) - whole), whole.int())


@dataclass(frozen=True)
class Arithmetic:
    """How a kernel attends, in the log2 domain.

    block:       keys of a step
    weights:     how weights are rounded before the second product
    sums:        how they are rounded before they are summed
    scores, total, accumulator: how these are rounded, the latter two after each step
    headroom:    the largest weight is 2 ** headroom
    lazy:        the maximum is kept until a score exceeds it by so much (log2)
    pairs:       the weights of every other block are rounded again when the next one raises the maximum
    backwards:   the last block comes first
    exp2:        what computes it

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


EXACT = Arithmetic(block=1 << 30, weights=exact)
IN_BF16 = Arithmetic()


def attend(scores: torch.Tensor, values: torch.Tensor, how: Arithmetic = IN_BF16) -> Partial:
    """scores are in natural units, -inf where masked; a query that sees no key has a result of zeros."""
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
        base = finite(highest)
        rescale = how.exp2(torch.where(peak == -math.inf, -math.inf, peak - base)) if number else 0.0 * base
        exponentials = how.exp2(part - base + how.headroom)
        rounded = how.weights(exponentials)
        if how.pairs and number % 2 == 0 and number + 1 < len(steps):
            later = highest.maximum(steps[number + 1][0].amax(-1, keepdim=True))
            back = how.exp2(base - finite(later))
            rounded = torch.where(back > 0, how.weights(rounded * back) / back.clamp(min=1e-30), 0.0)
        total = how.total(total * (rescale if how.of_total else 1.0) + how.sums(exponentials).sum(-1, True))
        used = before[..., : v.shape[-2]] if how.delayed and before is not None else rounded
        result = how.accumulator(result * (rescale if how.of_result else 1.0) + used @ v)
        peak, before = highest, rounded
    log = finite(peak) - how.headroom + total.log2()
    return log, torch.where(peak == -math.inf, 0.0, result / total)


def finite(peak: torch.Tensor) -> torch.Tensor:
    """A maximum to take off: 0 where there is none yet."""
    return torch.where(peak == -math.inf, 0.0, peak)


def combine(partials: list[Partial], results: Round = exact, log_sums: Round = exact) -> torch.Tensor:
    """Partial results, weighted by their sums of exponentials; how they are rounded before."""
    logs = log_sums(torch.stack([log for log, _ in partials]))
    share = (logs - logs.amax(0)).exp2()
    return (share / share.sum(0) * results(torch.stack([result for _, result in partials]))).sum(0)


def evenly(keys: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Where parts of whole units begin and end; the last may be shorter, and there are fewer of few keys."""
    each = math.ceil(math.ceil(keys / parts) / unit) * unit
    return [(start, min(keys, start + each)) for start in range(0, keys, each)]
