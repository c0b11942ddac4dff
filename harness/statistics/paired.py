"""Paired comparison of two entries that were timed in the same rounds, and the noise that an A/A pair
shows; and the arithmetic of independent measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.statistics.intervals import CONFIDENCE, interval

MARGIN = 0.005  # a smaller difference than this counts as none

MAX_NOISE = 0.25
"""An A/A pair that may differ by more shows a disturbance: then no two entries are called the same."""

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

    The verdict is `same` where the interval lies inside 1 +- max(floor, margin) and the noise is not above
    MAX_NOISE; else `faster` or `slower` where it lies above 1 + floor or below 1 / (1 + floor); else
    `unclear`.

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
    over_blocks = interval(logs, confidence)
    low = exponential(over_blocks.low)
    high = exponential(over_blocks.high)
    word = verdict(low, high, noise=floor, margin=margin)
    return Comparison(exponential(over_blocks.mean), low, high, word)


def exponential(log: float) -> float:
    """e to the power `log`; infinite where that is beyond what a float holds."""
    return math.exp(log) if log < 700 else math.inf


def verdict(low: float, high: float, *, noise: float, margin: float = MARGIN) -> VerdictName:
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
    the farther end, so that only larger differences have a verdict. Where the pair has no interval, the noise
    is infinite, which makes all verdicts `unclear`."""
    low, high = same_thing_twice.low, same_thing_twice.high
    if low <= 0:
        return math.inf
    if max(1 - low, high - 1) > MAX_NOISE:
        return max(high, 1 / low) - 1
    return max(0.0, low - 1, 1 - high)


def _is_time(seconds: float | None) -> bool:
    return seconds is not None and math.isfinite(seconds) and seconds > 0


def measured(value: float, low: float | None, high: float | None) -> Comparison:
    """One measurement, for example of a time, in any unit. None: that end of the interval is unknown."""
    return Comparison(value, low or 0.0, high or math.inf, "unclear")


def quotient(a: Comparison, b: Comparison) -> Comparison:
    """The quotient of two independent measurements, a / b."""
    ratio = a.ratio / b.ratio
    if not (_is_bounded(a) and _is_bounded(b)):
        return Comparison(ratio, 0.0, math.inf, "unclear")
    return _around(ratio, math.hypot(_half(a), _half(b)))


def pooled(measurements: Sequence[Comparison]) -> Comparison:
    """One quantity that was measured several times: the mean in logarithms. Its interval is as wide as
    the intervals of the measurements explain, or as these lie apart, whichever is wider."""
    logs = [math.log(measurement.ratio) for measurement in measurements]
    ratio = math.exp(statistics.fmean(logs))
    if not all(map(_is_bounded, measurements)):
        return Comparison(ratio, 0.0, math.inf, "unclear")
    explained = math.hypot(*map(_half, measurements)) / len(measurements)
    return _around(ratio, max(explained, (max(logs) - min(logs)) / 2))


def widened(measurement: Comparison, factor: float) -> Comparison:
    """The same value with an interval that is `factor` times as wide, in logarithms."""
    if not _is_bounded(measurement):
        return measurement
    return _around(measurement.ratio, factor * _half(measurement))


def _is_bounded(measurement: Comparison) -> bool:
    return measurement.low > 0 and math.isfinite(measurement.high)


def _half(measurement: Comparison) -> float:
    """Half the width of the interval, in logarithms."""
    return math.log(measurement.high / measurement.low) / 2


def _around(ratio: float, half: float) -> Comparison:
    return Comparison(ratio, ratio * math.exp(-half), ratio * math.exp(half), "unclear")
