"""Paired comparison of two entries, the noise of an A/A pair, and arithmetic of independent measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.statistics.intervals import CONFIDENCE, Interval, interval

MARGIN = 0.005  # a smaller difference than this counts as none

MAX_NOISE = 0.25
"""If the interval of the A/A pair reaches farther from 1 than this, no two entries are called the same."""

VerdictName = Literal["faster", "slower", "same", "unclear"]


@dataclass(frozen=True)
class Comparison:
    """The ratio time(b) / time(a) with its interval: above 1, a is faster. The verdict is about a."""

    ratio: float
    low: float
    high: float
    verdict: VerdictName


def compare(
    a: Sequence[float],
    b: Sequence[float],
    *,
    blocks: Sequence[int] | None = None,
    floor: float = 0.0,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Compares two entries by their times in the same rounds; a and b are paired by position. Pairs with a
    missing, zero or negative time are left out. The interval is that of `interval` over log(b / a).

    The verdict is `same` where the interval lies inside 1 +- max(floor, margin) and floor <= MAX_NOISE;
    else `faster` or `slower` where it lies above 1 + floor or below 1 / (1 + floor); else `unclear`.

    blocks: the block of each round; None: each round is independent
    floor:  the noise: no smaller difference has a verdict
    """
    if len(a) != len(b) or (blocks is not None and len(blocks) != len(a)):
        raise ValueError("a, b and blocks must have one entry per round")
    groups = range(len(a)) if blocks is None else blocks
    logs = []
    for group, time_a, time_b in zip(groups, a, b, strict=True):
        if _is_time(time_a) and _is_time(time_b):
            logs.append((group, math.log(time_b / time_a)))
    if not logs:
        return Comparison(math.nan, 0.0, math.inf, "unclear")
    return comparison_of(interval(logs, confidence), noise=floor, margin=margin)


def comparison_of(logarithm: Interval, *, noise: float, margin: float) -> Comparison:
    """The comparison of which the logarithm of the ratio has this interval, with its verdict."""
    low = exponential(logarithm.low)
    high = exponential(logarithm.high)
    return Comparison(exponential(logarithm.mean), low, high, verdict(low, high, noise=noise, margin=margin))


def exponential(log: float) -> float:
    """e to the power `log`; infinite where that is beyond what a float holds."""
    return math.exp(log) if log < 700 else math.inf


def verdict(low: float, high: float, *, noise: float, margin: float = MARGIN) -> VerdictName:
    """The verdict of `compare` on an interval of the ratio."""
    if not (math.isfinite(noise) and math.isfinite(high)):
        return "unclear"
    band = max(noise, margin)
    if noise <= MAX_NOISE and 1 - band <= low and high <= 1 + band:
        return "same"
    if low > 1 + noise:
        return "faster"
    if high < 1 / (1 + noise):
        return "slower"
    return "unclear"


def noise_of(same_thing_twice: Comparison) -> float:
    """The noise that an A/A pair shows: the distance of its interval from 1, which is 0 where the interval
    contains 1. Where an end of the interval is farther from 1 than MAX_NOISE, the noise is the distance of
    the farther end: only larger differences have a verdict. Without an interval the noise is infinite, which
    makes all verdicts `unclear`."""
    low, high = same_thing_twice.low, same_thing_twice.high
    if low <= 0:
        return math.inf
    if max(1 - low, high - 1) > MAX_NOISE:
        return max(high, 1 / low) - 1
    return max(0.0, low - 1, 1 - high)


def _is_time(seconds: float | None) -> bool:
    return seconds is not None and math.isfinite(seconds) and seconds > 0


def measured(value: float, low: float | None, high: float | None) -> Comparison:
    """A measured value with its interval, for the functions below. None: that end of it is unknown."""
    return Comparison(value, low or 0.0, high or math.inf, "unclear")


def quotient(a: Comparison, b: Comparison) -> Comparison:
    """The quotient of two independent measurements, a / b."""
    ratio = a.ratio / b.ratio
    if not (_is_bounded(a) and _is_bounded(b)):
        return Comparison(ratio, 0.0, math.inf, "unclear")
    return _around(ratio, math.hypot(_log_half_width(a), _log_half_width(b)))


def pooled(measurements: Sequence[Comparison]) -> Comparison:
    """One quantity that was measured several times: the geometric mean. Its interval is the wider of two: the
    one that follows from the intervals of the measurements, and one as wide as the measurements lie apart."""
    logs = [math.log(measurement.ratio) for measurement in measurements]
    ratio = math.exp(statistics.fmean(logs))
    if not all(map(_is_bounded, measurements)):
        return Comparison(ratio, 0.0, math.inf, "unclear")
    of_intervals = math.hypot(*map(_log_half_width, measurements)) / len(measurements)
    of_distances = (max(logs) - min(logs)) / 2
    return _around(ratio, max(of_intervals, of_distances))


def widened(measurement: Comparison, factor: float) -> Comparison:
    """The same value with an interval that is `factor` times as wide, in logarithms."""
    if not _is_bounded(measurement):
        return measurement
    return _around(measurement.ratio, factor * _log_half_width(measurement))


def _is_bounded(measurement: Comparison) -> bool:
    return measurement.low > 0 and math.isfinite(measurement.high)


def _log_half_width(measurement: Comparison) -> float:
    """Half the width of the logarithm's interval."""
    return math.log(measurement.high / measurement.low) / 2


def _around(value: float, log_half_width: float) -> Comparison:
    """A value with an interval of this half width in logarithms."""
    factor = math.exp(log_half_width)
    return Comparison(value, value / factor, value * factor, "unclear")
