"""Confidence intervals for time ratios from paired rounds.

Rounds of a block share one preparation, so blocks are independent and rounds are not. The centre of a block
is its Hodges-Lehmann estimate. Blocks are pooled as a meta-analysis pools studies: random effects with the
interval of Hartung and Knapp.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95

MIN_BLOCKS = 6  # the results are not looked at with fewer: Student's t is too wide to be of use then

LOOK_WIDENING = 1.2
"""With MIN_BLOCKS or more, a look at the results may have decided the number of blocks, so that the
interval has to be wider by this factor (results/statistics/README.md: without it 7 % of verdicts were false
where preparations differ)."""


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float
    groups: int  # how many independent groups it is computed from


def interval(values: Iterable[tuple[int, float]], confidence: float = CONFIDENCE) -> Interval:
    """The mean over groups and its interval, from (group, value) pairs. With one group the interval is
    infinite.

    It is the wider of two intervals: Student's over the groups, with the error of Hartung and Knapp from
    how far the groups lie apart (2001, Statistics in Medicine 20:3875), and the normal one that the scatter
    within groups explains, so that groups that agree by chance do not end a measurement (Roever, Knapp and
    Friede 2015, BMC Medical Research Methodology 15:99). Groups of a single value each are treated as one
    sample.
    """
    grouped: dict[int, list[float]] = {}
    for group, value in values:
        grouped.setdefault(group, []).append(value)
    groups = [centre(tuple(group)) for group in grouped.values()]
    if len(groups) < 2:
        return Interval(groups[0].value, -math.inf, math.inf, 1)
    student = students_t(len(groups) - 1, confidence)
    if all(group.n == 1 for group in groups):
        whole = centre(tuple(group.value for group in groups))
        mean = whole.value
        half = student * whole.error
    else:
        mean, explained, apart = _pool(groups)
        widening = LOOK_WIDENING if len(groups) >= MIN_BLOCKS else 1.0
        half = max(widening * student * apart, students_t(math.inf, confidence) * explained)
    return Interval(mean, mean - half, mean + half, len(groups))


@dataclass(frozen=True)
class Centre:
    """The location of some values."""

    value: float
    error: float  # its standard error
    n: int  # the number of values


@functools.lru_cache(maxsize=1 << 14)
def centre(values: tuple[float, ...]) -> Centre:
    """Hodges and Lehmann's estimate: the median of the averages of all pairs (Walsh averages).

    It needs 5 % more rounds than the mean where noise is normal (a median needs 57 % more), and far fewer
    where noise has heavy tails or two states. Its standard error is half the distance between the two
    averages that lie one standard deviation of Wilcoxon's signed-rank statistic to either side of the
    middle (Hodges and Lehmann 1963, Annals of Mathematical Statistics 34:598; Lehmann 1963, ibid. 34:1507).
    """
    n = len(values)
    pairs = itertools.combinations_with_replacement(values, 2)
    averages = sorted((x + y) / 2 for x, y in pairs)
    middle = (len(averages) - 1) / 2
    reach = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    spread = _at(averages, middle + reach) - _at(averages, middle - reach)
    return Centre(_at(averages, middle), spread / 2, n)


def _at(ordered: Sequence[float], position: float) -> float:
    """The value at a fractional position, interpolated; beyond the ends, the value at the end."""
    position = min(max(position, 0.0), len(ordered) - 1.0)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _pool(centres: Sequence[Centre]) -> tuple[float, float, float]:
    """Random effects. Returns the mean, in which each centre has the weight 1 / (variance between + its own
    variance); the error of the mean that these variances explain; and the error that the distances of the
    centres show.

    The variance between is the estimate of DerSimonian and Laird (1986, Controlled Clinical Trials 7:177).
    """
    k = len(centres)
    # The variance of one round is taken to be the same in all blocks: the median over rounds, because a
    # block may be disturbed. A block of one round says nothing of it.
    variances = []
    for c in centres:
        if c.n > 1:
            variances += [c.n * c.error**2] * c.n
    unit = statistics.median(variances)
    weights = [1.0] * k
    if unit > 0:
        # A block that is more disturbed than the others has the weight of its own scatter.
        plain = [1 / max(unit / c.n, c.error**2) for c in centres]
        effective = sum(plain) - sum(w * w for w in plain) / sum(plain)
        between = max(0.0, _spread(centres, plain) - (k - 1)) / effective
        weights = [1 / (between + 1 / w) for w in plain]
    explained = 1 / math.sqrt(sum(weights)) if unit > 0 else 0.0
    apart = math.sqrt(_spread(centres, weights) / (k - 1) / sum(weights))
    return weighted_mean([c.value for c in centres], weights), explained, apart


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def _spread(centres: Sequence[Centre], weights: Sequence[float]) -> float:
    """Cochran's Q: the weighted sum of squares about the weighted mean."""
    mean = weighted_mean([c.value for c in centres], weights)
    return sum(w * (c.value - mean) ** 2 for w, c in zip(weights, centres, strict=True))


def mean_half_width(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """The half width of Student's interval for the mean of independent values; infinite for fewer than
    two."""
    if len(values) < 2:
        return math.inf
    return students_t(len(values) - 1, confidence) * (statistics.stdev(values) / math.sqrt(len(values)))


@functools.cache
def students_t(degrees: float, confidence: float) -> float:
    """The two-sided quantile of Student's t: how many standard errors an interval of that confidence
    reaches to either side."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + confidence / 2))
