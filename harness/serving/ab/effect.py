"""Statistics of an A/B: when the pairs are looked at, an effect with its interval, pairs needed.

A launch is the unit: runs of one launch share its memory addresses, its tuned kernels and its clocks, and
taken as independent they give 23 to 59 % false verdicts at a nominal 5 %. So each pair is one launch of each
arm, and its value the logarithm of their ratio. To look after every pair and to stop at significance gives
18 % false verdicts; four looks that share the error give less than 5 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.statistics.intervals import CONFIDENCE, mean_half_width, students_t
from harness.statistics.paired import VerdictName, verdict

LOOKS = (4, 6, 8, 12)  # pairs after which the default plan is looked at
MOST_PAIRS = 200  # that are worth asking for
POWER = 0.8
# Deviation between launches of one image, in per cent: ATOM's nightly dashboard, DeepSeek-R1 on 8 MI355X, the
# same tag in two workflow runs (63 to 66 differences; data.js at 94114ac, 984cb47, e6d8fb9 of ROCm/ATOM), at
# a concurrency of 32 and more, and below it.
SPREAD = {"tpot": (0.53, 1.2), "throughput": (0.58, 1.1), "ttft": (2.5, 4.1), "ttft_median": (2.5, 4.1)}
BUSY = 32


def looks(pairs: int | None) -> tuple[int, ...]:
    """Pairs after which there may be a verdict: a number that was fixed beforehand is looked at once."""
    return LOOKS if pairs is None else (pairs,)


def confidence(pairs: int | None, comparisons: int) -> float:
    """Of each interval, so that all looks and all arms together are wrong in at most 5 % (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / len(looks(pairs)) / comparisons


def spread(metric: str, concurrency: int | None) -> float:
    """Expected deviation between launches, per cent."""
    busy, quiet = SPREAD[metric]
    return busy if concurrency is not None and concurrency >= BUSY else quiet


@dataclass(frozen=True)
class Effect:
    """ratio > 1: the arm is faster (time of the base over its own, or its throughput over the base's).

    launch_spread: deviation between launches of one arm, per cent: that of the pairs over the root of two
    """

    pairs: int
    base: float
    arm: float
    ratio: float
    low: float
    high: float
    confidence: float
    launch_spread: float | None
    verdict: VerdictName


def effect(
    base: Sequence[float], arm: Sequence[float], *, higher: bool, level: float, margin: float
) -> Effect:
    """Of at least one pair; Student's t over the logarithms of the pairs' ratios.

    higher: more is better; margin: per cent
    """
    logs = [math.log(b / a) if higher else math.log(a / b) for a, b in zip(base, arm, strict=True)]
    mean, half = statistics.fmean(logs), mean_half_width(logs, level)
    low, high = math.exp(mean - half), math.exp(mean + half) if half < 100 else math.inf
    apart = 100 * statistics.stdev(logs) / math.sqrt(2) if len(logs) > 1 else None
    return Effect(
        len(logs), statistics.fmean(base), statistics.fmean(arm), math.exp(mean), low, high, level, apart,
        verdict(low, high, floor=0.0, margin=margin / 100),
    )  # fmt: skip


def power(change: float, pairs: int, launch_spread: float, level: float) -> float:
    """Chance that so many pairs tell a change of so many per cent from none."""
    from scipy.special import nctdtr

    shift = math.log1p(change / 100) / (launch_spread / 100 * math.sqrt(2 / pairs))
    return 1 - float(nctdtr(pairs - 1, shift, students_t(pairs - 1, level)))


def pairs_for(change: float, launch_spread: float, level: float, among: Sequence[int]) -> int | None:
    """The fewest pairs that find such a change four times in five; None: more than there are to choose."""
    return next((n for n in among if n > 1 and power(change, n, launch_spread, level) >= POWER), None)


def more_pairs(found: Effect, margin: float) -> tuple[int, float] | None:
    """How many more pairs would decide if mean and scatter stay as they are, and the half width, per cent,
    that the interval would have then; None: more than are worth it, or one pair says nothing of it."""
    if found.launch_spread is None:
        return None
    away = abs(math.log(found.ratio))
    enough = max(away, math.log1p(margin / 100) - away)
    for n in range(found.pairs + 1, MOST_PAIRS + 1):
        half = students_t(n - 1, found.confidence) * found.launch_spread / 100 * math.sqrt(2 / n)
        if half < enough:
            return n - found.pairs, 100 * half
    return None
