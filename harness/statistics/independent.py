"""Independent measurements of what is positive: half widths of intervals add in quadrature, in logs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from harness.statistics.paired import Comparison


def measured(value: float, low: float | None, high: float | None) -> Comparison:
    """One by itself, a time say, in any unit; None: that end is not known."""
    return Comparison(value, low or 0.0, high or math.inf, "unclear")


def quotient(a: Comparison, b: Comparison) -> Comparison:
    """a over b."""
    ratio = a.ratio / b.ratio
    if not (_is_bounded(a) and _is_bounded(b)):
        return Comparison(ratio, 0.0, math.inf, "unclear")
    return _around(ratio, math.hypot(_half(a), _half(b)))


def pooled(several: Sequence[Comparison]) -> Comparison:
    """Of one quantity measured several times: the mean of logs, its interval as wide as theirs explain and as
    they lie apart."""
    logs = [math.log(one.ratio) for one in several]
    ratio = math.exp(statistics.fmean(logs))
    if not all(map(_is_bounded, several)):
        return Comparison(ratio, 0.0, math.inf, "unclear")
    explained = math.hypot(*map(_half, several)) / len(several)
    return _around(ratio, max(explained, (max(logs) - min(logs)) / 2))


def widened(one: Comparison, by: float) -> Comparison:
    """With an interval so many times as wide."""
    return _around(one.ratio, by * _half(one)) if _is_bounded(one) else one


def _is_bounded(one: Comparison) -> bool:
    return one.low > 0 and math.isfinite(one.high)


def _half(one: Comparison) -> float:
    return math.log(one.high / one.low) / 2


def _around(ratio: float, half: float) -> Comparison:
    return Comparison(ratio, ratio * math.exp(-half), ratio * math.exp(half), "unclear")
