"""The statistics of an A/B: when its pairs are looked at, an arm's effect, and how many pairs find one.

The unit is a launch. Runs of one launch share memory addresses, tuned kernels and clocks; taken as
independent they give 23 to 59 % false verdicts at a nominal 5 %. So a pair is one launch of each arm, and its
value the logarithm of their ratio. Looking after every pair and stopping at significance gives 18 % false
verdicts. Four looks that share the error give less than 5 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.files import read_toml
from harness.statistics.intervals import CONFIDENCE, mean_half_width, students_t
from harness.statistics.paired import VerdictName, verdict

LOOKS = (4, 6, 8, 12)
"""The numbers of pairs after which an A/B is looked at: verdicts are only made then."""
MOST_PAIRS = 200  # more pairs than this are not proposed
POWER = 0.8  # the chance of finding an effect with which a number of pairs suffices for it
SPREAD = read_toml(Path(__file__).with_name("engines.toml"))["spread"]


def looks(pairs: int | None) -> tuple[int, ...]:
    """The numbers of pairs after which there may be a verdict: only the user's number, if it is fixed."""
    return LOOKS if pairs is None else (pairs,)


def usual_spread(metric: str, concurrency: int | None) -> float:
    """The deviation of a metric between launches of one server, in per cent, as engines.toml has it: less if
    many requests are in flight."""
    busy, quiet = SPREAD[metric]
    return busy if (concurrency or 0) >= SPREAD["busy"] else quiet


def confidence(pairs: int | None, comparisons: int) -> float:
    """The confidence of each interval: all looks and arms together are wrong in at most 5 % (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / len(looks(pairs)) / comparisons


@dataclass(frozen=True)
class Effect:
    """The effect of an arm. A ratio above 1 means that it is faster: the base's time over its own, or its
    throughput over the base's."""

    pairs: int
    base: float  # mean of the metric, in its own unit
    arm: float
    ratio: float
    low: float  # ends of the ratio's interval; 0 and infinity where pairs give none, as one pair
    high: float
    percent: float  # change of the metric itself
    interval: list[float] | None  # of `percent`; None where there is none
    confidence: float
    launch_spread: float | None
    """Deviation between launches of an arm, in per cent: that of pairs over sqrt(2); None for one pair."""
    verdict: VerdictName


def effect(
    base: Sequence[float], arm: Sequence[float], *, higher: bool, level: float, margin: float
) -> Effect:
    """The effect by one pair or more, with Student's t over the logarithms of the pairs' ratios.

    base, arm: the metric in each pair
    higher:    whether more of it is better
    level:     the interval's confidence
    margin:    in per cent
    """
    logs = [math.log(b / a) if higher else math.log(a / b) for a, b in zip(base, arm, strict=True)]

    def percent(log: float) -> float:
        """The change of the metric where this is the logarithm of the ratio."""
        return 100 * math.expm1(log if higher else -log)

    mean = statistics.fmean(logs)
    low, high = 0.0, math.inf
    interval = launch_spread = None
    half_width = mean_half_width(logs, level)
    if half_width < 100:  # a wider one says nothing, and its ends are no floating-point numbers
        low, high = math.exp(mean - half_width), math.exp(mean + half_width)
        interval = sorted([percent(mean - half_width), percent(mean + half_width)])
    if len(logs) > 1:
        launch_spread = 100 * statistics.stdev(logs) / math.sqrt(2)
    return Effect(
        pairs=len(logs),
        base=statistics.fmean(base),
        arm=statistics.fmean(arm),
        ratio=math.exp(mean),
        low=low,
        high=high,
        percent=percent(mean),
        interval=interval,
        confidence=level,
        launch_spread=launch_spread,
        verdict=verdict(low, high, noise=0.0, margin=margin / 100),
    )


def power(change: float, pairs: int, launch_spread: float, level: float) -> float:
    """The chance that two or more pairs tell a change from none.
    change, launch_spread: in per cent; level: the confidence of the interval"""
    from scipy.special import nctdtr

    shift = math.log1p(change / 100) / (launch_spread / 100 * math.sqrt(2 / pairs))
    return 1 - float(nctdtr(pairs - 1, shift, students_t(pairs - 1, level)))


def pairs_for(
    change: float, launch_spread: float, level: float, among: Sequence[int] = range(2, MOST_PAIRS + 1)
) -> int | None:
    """The least of these numbers of pairs that finds a change four times in five; None if none does.
    change, launch_spread, level: as for `power`; among: in ascending order, from 2 on"""
    return next((pairs for pairs in among if power(change, pairs, launch_spread, level) >= POWER), None)


def more_pairs(found: Effect, margin: float) -> tuple[int, float] | None:
    """How many more pairs would decide if mean and scatter stay as they are, and the half width of the
    interval by then, in per cent. None if more than MOST_PAIRS would be needed, or if there is one pair."""
    if found.launch_spread is None:
        return None
    distance = abs(math.log(found.ratio))
    to_margin = math.log1p(margin / 100) - distance
    for pairs in range(found.pairs + 1, MOST_PAIRS + 1):
        deviation = found.launch_spread / 100 * math.sqrt(2 / pairs)  # of the mean over pairs
        half_width = students_t(pairs - 1, found.confidence) * deviation
        if half_width < max(distance, to_margin):  # the interval is without 1, or within the margin
            return pairs - found.pairs, 100 * half_width
    return None
