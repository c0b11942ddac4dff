"""Independent measurements of positive quantities: the half widths of their intervals, in logarithms, add
in quadrature."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from harness.statistics.paired import Comparison


def measured(value: float, low: float | None, high: float | None) -> Comparison:
    """One measurement, for example of a time, in any unit. None: that end of the interval is unknown."""
    return Comparison(value, low or 0.0, high or math.inf, "unclear")


def quotient(a: Comparison, b: Comparison) -> Comparison:
    """The quotient of two independent measurements, a / b."""
    ratio = a.ratio / b.ratio
    if not (_is_bounded(a) and _is_bounded(b)):
        return Comparison(ratio, 0.0, math.inf, "unclear")
    return _around(ratio, math.hypot(_half(a), _half(b)))


def pooled(several: Sequence[Comparison]) -> Comparison:
    """One quantity that was measured several times: the mean in logarithms. Its interval is as wide as
    their intervals explain, or as they lie apart, whichever is wider."""
    logs = [math.log(one.ratio) for one in several]
    ratio = math.exp(statistics.fmean(logs))
    if not all(map(_is_bounded, several)):
        return Comparison(ratio, 0.0, math.inf, "unclear")
    explained = math.hypot(*map(_half, several)) / len(several)
    return _around(ratio, max(explained, (max(logs) - min(logs)) / 2))


def widened(one: Comparison, by: float) -> Comparison:
    """The same value with an interval that is `by` times as wide."""
    return _around(one.ratio, by * _half(one)) if _is_bounded(one) else one


def _is_bounded(one: Comparison) -> bool:
    return one.low > 0 and math.isfinite(one.high)


def _half(one: Comparison) -> float:
    return math.log(one.high / one.low) / 2


def _around(ratio: float, half: float) -> Comparison:
    return Comparison(ratio, ratio * math.exp(-half), ratio * math.exp(half), "unclear")
