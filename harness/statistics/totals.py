"""The ratio of the times that two entries take for several cases together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.statistics.intervals import CONFIDENCE, Interval, interval
from harness.statistics.paired import Comparison, verdict

Times = Mapping[tuple[int, int], float]
"""Seconds per call by block and round."""


def total_ratio(
    cases: Sequence[tuple[float, Times, Times]],
    *,
    noise: float = 0.0,
    margin: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """The time of b over that of a for all cases, each counted with its weight: sum(w b) / sum(w a).

    cases: of each case its weight w, and the times of a and of b
    noise, margin: as in `compare`

    With the time a_i in case i and the ratio r_i that `compare` gives, b_i = r_i a_i and
    R = sum(w_i b_i) / sum(w_i a_i). With the shares p_i = w_i a_i / sum(w a) and q_i = w_i b_i / sum(w b),
    small errors change log R by the sum over i of q_i d(log b_i) - p_i d(log a_i). Its half width in case i,
    h_i, is that of `interval` over q_i log b - p_i log a of the rounds that both have; where they have none
    in common, h_i^2 = h(q_i log b)^2 + h(p_i log a)^2. Cases are independent, so that of log R is
    sqrt(sum(h_i^2)). Each h_i has Student's factor for the blocks of its own case, so the sum is rather too
    wide than too narrow (Cochran 1964, Biometrics 20:191). For one case R is the ratio of `compare`.
    """
    alone = [(weight, math.exp(_mean(a, 1.0).mean), a, b) for weight, a, b in cases]
    both = [(w * time, w * time * math.exp(_sum_log(a, -1.0, b, 1.0)[0])) for w, time, a, b in alone]
    total_a, total_b = (sum(side) for side in zip(*both, strict=True))
    halves = [
        _sum_log(a, -of_a / total_a, b, of_b / total_b, confidence)[1]
        for (_, _, a, b), (of_a, of_b) in zip(alone, both, strict=True)
    ]
    ratio, half = total_b / total_a, math.hypot(*halves)
    low, high = (ratio / math.exp(half), ratio * math.exp(half)) if half < 700 else (0.0, math.inf)
    return Comparison(ratio, low, high, verdict(low, high, noise=noise, margin=margin))


def _sum_log(a: Times, p: float, b: Times, q: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The value and the half width of p log a + q log b."""
    shared = sorted(a.keys() & b.keys())
    if shared:
        parts = [interval([(at[0], p * math.log(a[at]) + q * math.log(b[at])) for at in shared], confidence)]
    else:
        parts = [_mean(a, p, confidence), _mean(b, q, confidence)]
    return sum(part.mean for part in parts), math.hypot(*(part.high - part.mean for part in parts))


def _mean(times: Times, factor: float, confidence: float = CONFIDENCE) -> Interval:
    return interval([(block, factor * math.log(s)) for (block, _), s in times.items()], confidence)
