"""Attention as kernels compute it, right and wrong: keys in blocks, and in parts that are combined.

Tensors are fp32: scores [..., keys], values [..., keys, width]. A sum of exponentials is given as its log2
[..., 1], here called a log-sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from kernels.arithmetic.roundings import E4M3, Round, bf16, exact, fp8, fp16, kept

LOG2E = math.log2(math.e)
Partial = tuple[torch.Tensor, torch.Tensor]
"""The attention of some of the keys: their log-sum [..., 1], and their result [..., width]."""


def exp2_linear(x: torch.Tensor) -> torch.Tensor:
    """2 ** x by a straight line between powers of two, which is at most 6 percent too high."""
    whole = x.clamp(min=-126.0).floor()
    return torch.ldexp(1.0 + (x.clamp(min=-126.0) - whole), whole.int())


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


WRONG_SOFTMAX: Mapping[str, Arithmetic] = {
    "no maximum subtracted": Arithmetic(has_maximum=False),
    "maximum begins at 0": Arithmetic(first_peak=0.0),
    "result not rescaled when the maximum rises": Arithmetic(of_result=False, block=32),
    "sum not rescaled when the maximum rises": Arithmetic(of_total=False, block=32),
    "values of the next block": Arithmetic(delayed=True, block=32),
    "scores in bf16": Arithmetic(scores=bf16),
    "scores in fp16": Arithmetic(scores=fp16),
    "weights in FP8": Arithmetic(weights=partial(fp8, E4M3)),
    "weights of 5 bits": Arithmetic(weights=partial(kept, 5)),
    "result in bf16 after each token": Arithmetic(accumulator=bf16, block=1),
    "sum in bf16 after each token": Arithmetic(total=bf16, block=1),
    "exp2 by straight lines": Arithmetic(exp2=exp2_linear),
}

WRONG_LOG_SUMS: Mapping[str, Round] = {
    "log-sums of base 2 taken for natural ones": lambda logs: logs * LOG2E,
    "log-sums of the previous row": lambda logs: logs.roll(1, -2),
    "log-sums in bf16": bf16,
}
"""Changes of the parts' log-sums before they are combined."""


# Wrong queries, keys and values of both ops of attention


def without(start: int, stop: int, q: torch.Tensor) -> torch.Tensor:
    """q [..., width] with zeros in some columns."""
    return torch.cat([q[..., :start], q[..., start:stop] * 0, q[..., stop:]], -1)


def other_rope_order(start: int, q: torch.Tensor) -> torch.Tensor:
    """q [..., width] whose rope part, from a column on, is interleaved though it should be in two halves."""
    first, second = q[..., start:].chunk(2, -1)
    return torch.cat([q[..., :start], torch.stack([first, second], -1).flatten(-2)], -1)


def zero_counted(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Counts a key and a value of zeros behind the last key."""
    weights = torch.nn.functional.pad(scores, (0, 1)).softmax(-1)
    return weights[..., :-1] @ values
