"""Confidence intervals for time ratios from paired rounds.

Rounds of a block share one preparation, so blocks are independent of each other and the rounds of one block
are not. The centre of a block is its Hodges-Lehmann estimate. Blocks are pooled as a meta-analysis pools
studies: random effects with the interval of Hartung and Knapp.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95

MIN_BLOCKS = 6  # the results are first looked at after so many blocks: with fewer, Student's t is too wide

LOOK_WIDENING = 1.2
"""From MIN_BLOCKS blocks on, looks at the results decide the number of blocks. So the interval is wider by
this factor (results/statistics/README.md: else 7 % of verdicts were false where preparations differ)."""


@dataclass(frozen=True)
class Interval:
    """A mean over groups with its confidence interval."""

    mean: float
    low: float
    high: float
    groups: int  # how many independent groups it is computed from


def interval(values: Iterable[tuple[int, float]], confidence: float = CONFIDENCE) -> Interval:
    """The mean over groups and its interval, from (group, value) pairs. With one group it is infinite.

    It is the wider of two intervals. One is Student's over the groups, with the error of Hartung and Knapp
    from the distances between groups (2001, Statistics in Medicine 20:3875). The other is the normal one
    from the error that the variances explain: without it, groups that agree by chance would end a measurement
    (Roever, Knapp and Friede 2015, BMC Medical Research Methodology 15:99). Groups of a single value each are
    treated as one sample.
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
        half_width = student * whole.error
    else:
        mean, explained_error, observed_error = _pool(groups)
        widening = LOOK_WIDENING if len(groups) >= MIN_BLOCKS else 1.0
        normal = students_t(math.inf, confidence)
        half_width = max(widening * student * observed_error, normal * explained_error)
    return Interval(mean, mean - half_width, mean + half_width, len(groups))


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
    where noise has heavy tails or two states. Its standard error is half the distance between two of the
    sorted averages: those whose places lie one standard deviation of Wilcoxon's signed-rank statistic to
    either side of the middle (Hodges and Lehmann 1963, Annals of Mathematical Statistics 34:598; Lehmann
    1963, ibid. 34:1507).
    """
    n = len(values)
    pairs = itertools.combinations_with_replacement(values, 2)
    averages = sorted((x + y) / 2 for x, y in pairs)
    middle = (len(averages) - 1) / 2
    wilcoxon_deviation = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    distance = _at(averages, middle + wilcoxon_deviation) - _at(averages, middle - wilcoxon_deviation)
    return Centre(_at(averages, middle), distance / 2, n)


def _at(ordered: Sequence[float], position: float) -> float:
    """The value at a fractional position, interpolated; beyond the ends, the value at the end."""
    position = min(max(position, 0.0), len(ordered) - 1.0)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _pool(centres: Sequence[Centre]) -> tuple[float, float, float]:
    """The mean of the centres of blocks with random effects, the error of the mean that the variances
    explain, and the error that the distances between the centres show.

    The weight of a centre is 1 / (variance between blocks + its own variance). The variance between blocks is
    the estimate of DerSimonian and Laird (1986, Controlled Clinical Trials 7:177).
    """
    k = len(centres)
    # The variance of a round is taken to be the same in all blocks: the median, as a block may be disturbed.
    variances: list[float] = []
    for c in centres:
        if c.n > 1:  # a single round has no variance
            variances += [c.n * c.error**2] * c.n  # each of the block's rounds has the variance of the block
    round_variance = statistics.median(variances)
    weights = [1.0] * k
    explained_error = 0.0
    if round_variance > 0:
        # The variance of a block that is more disturbed than the others is that of its own scatter.
        within = [max(round_variance / c.n, c.error**2) for c in centres]
        inverse = [1 / variance for variance in within]
        effective = sum(inverse) - sum(w * w for w in inverse) / sum(inverse)
        between = max(0.0, _spread(centres, inverse) - (k - 1)) / effective
        weights = [1 / (between + variance) for variance in within]
        explained_error = 1 / math.sqrt(sum(weights))
    observed_error = math.sqrt(_spread(centres, weights) / (k - 1) / sum(weights))
    return weighted_mean([c.value for c in centres], weights), explained_error, observed_error


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def _spread(centres: Sequence[Centre], weights: Sequence[float]) -> float:
    """Cochran's Q: the weighted sum of squares about the weighted mean."""
    mean = weighted_mean([c.value for c in centres], weights)
    return sum(w * (c.value - mean) ** 2 for w, c in zip(weights, centres, strict=True))


def mean_half_width(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """The half width of Student's interval for the mean of independent values; infinite for one or none."""
    if len(values) < 2:
        return math.inf
    return students_t(len(values) - 1, confidence) * (statistics.stdev(values) / math.sqrt(len(values)))


@functools.cache
def students_t(degrees: float, confidence: float) -> float:
    """Student's two-sided t: how many standard errors an interval of that confidence reaches to each side."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + confidence / 2))
