"""Attention as kernels compute it, right and wrong: keys in blocks, and in parts that are combined.

Tensors are fp32: scores [..., keys], values [..., keys, width]. A sum of exponentials is given as its log2
[..., 1], here called a log-sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.arithmetic.roundings import Round, bf16, exact

LOG2E = math.log2(math.e)
Partial = tuple[torch.Tensor, torch.Tensor]
"""The attention of some of the keys: their log-sum [..., 1], and their result [..., width]."""


@dataclass(frozen=True)
class Arithmetic:
    """How a kernel attends, with exponentials to base 2. The last five are for wrong kernels."""

    block: int = 64
    """Keys of a step."""
    weights: Round = bf16
    """Rounds the weights before the second product."""
    sums: Round = exact
    """Rounds the weights before they are summed."""
    scores: Round = exact
    total: Round = exact
    """Rounds the sum of the weights after each step."""
    accumulator: Round = exact
    """Rounds the result after each step."""
    headroom: float = 0.0
    """The largest weight is 2 ** headroom."""
    lazy: float = 0.0
    """The maximum is kept until a score exceeds it by so much."""
    pairs: bool = False
    """Whether the weights of every other block are rounded again when the next block raises the maximum."""
    backwards: bool = False
    """Whether the last block comes first."""
    exp2: Round = torch.exp2

    first_peak: float = -math.inf
    """The maximum before the first step."""
    has_maximum: bool = True
    """Whether the maximum is subtracted from the scores."""
    of_result: bool = True
    """Whether the result is rescaled when the maximum rises."""
    of_total: bool = True
    """Whether the sum is rescaled when the maximum rises."""
    delayed: bool = False
    """Whether the values of a step are multiplied with the weights of the step before."""


EXACT = Arithmetic(block=1 << 30, weights=exact)
IN_BF16 = Arithmetic()


def attend(scores: torch.Tensor, values: torch.Tensor, how: Arithmetic = IN_BF16) -> Partial:
    """scores are natural logarithms of weights, -inf where masked. A query that sees no key gets zeros."""
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
    """The maximum to subtract: 0 where there is none yet."""
    return torch.where(peak == -math.inf, 0.0, peak)


def combine(partials: list[Partial], results: Round = exact, log_sums: Round = exact) -> torch.Tensor:
    """Returns the result of all keys [..., width]. results and log_sums round the parts' own first."""
    logs = log_sums(torch.stack([log for log, _ in partials]))
    share = (logs - logs.amax(0)).exp2()
    return (share / share.sum(0) * results(torch.stack([result for _, result in partials]))).sum(0)


def evenly(keys: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Splits keys into parts of whole units, each (begin, end). The last part may be shorter, and few keys
    make fewer parts."""
    each = math.ceil(math.ceil(keys / parts) / unit) * unit
    return [(start, min(keys, start + each)) for start in range(0, keys, each)]
