"""The ratio of the times that two entries take for several cases together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.statistics.intervals import CONFIDENCE, Interval, interval
from harness.statistics.paired import MARGIN, Comparison, exponential, verdict

Times = Mapping[tuple[int, int], float]  # seconds per call by block and round
TINY = 1e-9  # the weight that cases of weight 0 get: where all have it, each counts as much as the others


def total_ratio(
    cases: Sequence[tuple[float, Times, Times]],
    *,
    noise: float = 0.0,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """The time of b over that of a for all cases, each counted with its weight: sum(w b) / sum(w a).

    cases: for each case its weight w, the times of a, and the times of b in the same rounds
    noise, margin: as in `compare`

    With the time a_i in case i and the ratio r_i that `compare` gives, b_i = r_i a_i and
    R = sum(w_i b_i) / sum(w_i a_i). With the shares p_i = w_i a_i / sum(w a) and q_i = w_i b_i / sum(w b),
    small errors change log R by the sum over i of q_i d(log b_i) - p_i d(log a_i). The half width h_i of the
    term of case i is that of `interval` over q_i log b - p_i log a of the rounds. Cases are independent, so
    the half width of log R is sqrt(sum(h_i^2)). Each h_i has Student's factor for the blocks of its own case,
    so the sum is rather too wide than too narrow (Cochran 1964, Biometrics 20:191). For one case R is the
    ratio of `compare`.
    """
    times_a = []  # w_i a_i
    times_b = []  # w_i b_i
    for weight, a, b in cases:
        logs_a = [(block, math.log(seconds)) for (block, _), seconds in sorted(a.items())]
        time_a = (weight or TINY) * math.exp(interval(logs_a).mean)
        times_a.append(time_a)
        times_b.append(time_a * math.exp(_log_ratio(b, 1.0, a, 1.0).mean))
    total_a = sum(times_a)
    total_b = sum(times_b)
    half_widths = []  # h_i
    for (_, a, b), time_a, time_b in zip(cases, times_a, times_b, strict=True):
        change = _log_ratio(b, time_b / total_b, a, time_a / total_a, confidence)
        half_widths.append(change.high - change.mean)
    ratio = total_b / total_a
    factor = exponential(math.hypot(*half_widths))
    low = ratio / factor
    high = ratio * factor
    return Comparison(ratio, low, high, verdict(low, high, noise=noise, margin=margin))


def _log_ratio(b: Times, q: float, a: Times, p: float, confidence: float = CONFIDENCE) -> Interval:
    """q log b - p log a, over the rounds that both have."""
    values = []
    for block, index in sorted(a.keys() & b.keys()):
        log_a = math.log(a[block, index])
        log_b = math.log(b[block, index])
        values.append((block, q * log_b - p * log_a))
    return interval(values, confidence)
