"""Intervals for time ratios from paired rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
MARGIN = 0.005
# An A/A pair that may be further apart measures the disturbance, not the machine.
MOST_NOISE = 0.25


@dataclass(frozen=True)
class Comparison:
    """time(b) / time(a) with its interval; > 1 means that a is faster, and the verdict is a's."""

    ratio: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class Interval:
    """A mean with its interval, and how many independent groups it rests on."""

    mean: float
    low: float
    high: float
    groups: int


def compare(
    a: Sequence[float],
    b: Sequence[float],
    *,
    blocks: Sequence[int] | None = None,
    floor: float = 0.0,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Compares two contenders timed in the same rounds; a and b are paired by position.

    blocks: the block of each round. Rounds of a block share one preparation and neighbouring times,
    so blocks are what is independent: the interval is Student's t over the blocks' medians of
    log(b / a). Without blocks each round counts by itself.

    same: the interval lies inside 1 +- max(floor, margin); else faster or slower if it lies outside
    1 +- floor on one side; else unclear. Pairs with a missing, zero or negative time are left out.
    """
    if len(a) != len(b) or (blocks is not None and len(blocks) != len(a)):
        raise ValueError("a, b and blocks must have one entry per round")
    groups = list(blocks) if blocks is not None else list(range(len(a)))
    logs = [
        (group, math.log(y / x))
        for group, x, y in zip(groups, a, b, strict=True)
        if _is_time(x) and _is_time(y)
    ]
    if not logs:
        return Comparison(math.nan, 0.0, math.inf, "unclear")
    over_blocks = interval(logs, confidence)
    ratio, low, high = (_exp(v) for v in (over_blocks.mean, over_blocks.low, over_blocks.high))
    return Comparison(ratio, low, high, verdict(low, high, floor=floor, margin=margin))


def verdict(low: float, high: float, *, floor: float, margin: float = MARGIN) -> str:
    if not (math.isfinite(floor) and math.isfinite(high)):
        return "unclear"
    band = max(floor, margin)
    if 1 - band <= low and high <= 1 + band:
        return "same"
    if low > 1 + floor:
        return "faster"
    if high < 1 - floor:
        return "slower"
    return "unclear"


def interval(values: Iterable[tuple[int, float]], confidence: float = CONFIDENCE) -> Interval:
    """Student's t interval over the medians of groups; (group, value) pairs, one group: infinite."""
    grouped: dict[int, list[float]] = {}
    for group, value in values:
        grouped.setdefault(group, []).append(value)
    centres = [statistics.median(group) for group in grouped.values()]
    mean = statistics.fmean(centres)
    if len(centres) < 2:
        return Interval(mean, -math.inf, math.inf, len(centres))
    from scipy.special import stdtrit

    t = float(stdtrit(len(centres) - 1, 0.5 + confidence / 2))
    half = t * statistics.stdev(centres) / math.sqrt(len(centres))
    return Interval(mean, mean - half, mean + half, len(centres))


def noise_floor(same_thing_twice: Comparison) -> float:
    """The floor that an A/A pair shows: as far from 1 as its interval reaches. Infinite, which makes
    every verdict `unclear`, where the pair says no more than that the machine was disturbed."""
    reach = max(abs(same_thing_twice.low - 1), abs(same_thing_twice.high - 1))
    return reach if reach <= MOST_NOISE else math.inf


def _exp(log: float) -> float:
    return math.exp(log) if log < 700 else math.inf


def _is_time(seconds: float | None) -> bool:
    return seconds is not None and math.isfinite(seconds) and seconds > 0
