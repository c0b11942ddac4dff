"""The ratio of the times that two entries take for several cases together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.statistics.intervals import CONFIDENCE, Interval, interval
from harness.statistics.paired import MARGIN, Comparison, verdict

Times = Mapping[tuple[int, int], float]  # seconds per call by block and round
TINY = 1e-9  # what a weight of 0 counts as, so that cases that all have it count alike


def total_ratio(
    cases: Sequence[tuple[float, Times, Times]],
    *,
    noise: float = 0.0,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """The time of b over that of a for all cases, each counted with its weight: sum(w b) / sum(w a).

    cases: of each case its weight w, and the times of a and of b, which share rounds
    noise, margin: as in `compare`

    With the time a_i in case i and the ratio r_i that `compare` gives, b_i = r_i a_i and
    R = sum(w_i b_i) / sum(w_i a_i). With the shares p_i = w_i a_i / sum(w a) and q_i = w_i b_i / sum(w b),
    small errors change log R by the sum over i of q_i d(log b_i) - p_i d(log a_i). Its half width in case i,
    h_i, is that of `interval` over q_i log b - p_i log a of the rounds. Cases are independent, so that of
    log R is sqrt(sum(h_i^2)). Each h_i has Student's factor for the blocks of its own case, so the sum is
    rather too wide than too narrow (Cochran 1964, Biometrics 20:191). For one case R is that of `compare`.
    """
    times = []
    for weight, a, b in cases:
        of_a = (weight or TINY) * math.exp(_log_ratio(b=a, q=1.0, a=a, p=0.0).mean)
        times.append((of_a, of_a * math.exp(_log_ratio(b, 1.0, a, 1.0).mean)))
    total_a, total_b = map(sum, zip(*times, strict=True))
    parts = [
        _log_ratio(b, of_b / total_b, a, of_a / total_a, confidence)
        for (_, a, b), (of_a, of_b) in zip(cases, times, strict=True)
    ]
    half = math.hypot(*(part.high - part.mean for part in parts))
    ratio, factor = total_b / total_a, math.exp(half) if half < 700 else math.inf
    low, high = ratio / factor, ratio * factor
    return Comparison(ratio, low, high, verdict(low, high, noise=noise, margin=margin))


def _log_ratio(b: Times, q: float, a: Times, p: float, confidence: float = CONFIDENCE) -> Interval:
    """q log b - p log a, over the rounds that both have."""
    shared = sorted(a.keys() & b.keys())
    return interval([(at[0], q * math.log(b[at]) - p * math.log(a[at])) for at in shared], confidence)
