"""Interpolation between the points of a table of times, with what the table itself says about its noise.

Times grow with the work, so a measured curve that falls is noise: it is replaced by its isotonic
regression in the logarithm (pool adjacent violators), and how far the points lie from that is the table's
noise. Between points the logarithm of the time is linear in the logarithm of the size.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BEYOND = 0.3  # deviation of a time for each factor e beyond the grid


@dataclass(frozen=True)
class TimeEstimate:
    """A time, and the deviations of its logarithm.

    noise:    of the table's own points around a curve that only grows
    distance: of interpolation: nothing at a grid point
    """

    us: float
    noise: float = 0.0
    distance: float = 0.0

    @property
    def deviation(self) -> float:
        return math.hypot(self.noise, self.distance)

    def times(self, factor: float) -> TimeEstimate:
        return TimeEstimate(self.us * factor, self.noise, self.distance)


class Curve:
    """us over one size, both positive; at least one point."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        points = sorted(points)
        self.sizes = [math.log(x) for x, _ in points]
        measured = [math.log(y) for _, y in points]
        self.times = isotonic(measured)
        left = [abs(a - b) for a, b in zip(measured, self.times, strict=True)]
        # the mean absolute deviation of a normal variable is 0.8 of its deviation
        self.noise = sum(left) / len(left) / 0.8

    def at(self, size: float) -> TimeEstimate:
        x, xs, ys = math.log(max(size, 1e-9)), self.sizes, self.times
        if x <= xs[0]:
            return TimeEstimate(math.exp(ys[0]), self.noise, BEYOND * (xs[0] - x))
        if x > xs[-1]:
            before = max((i for i in range(len(xs)) if xs[i] < xs[-1] - 0.5), default=0)
            run = xs[-1] - xs[before]
            slope = (ys[-1] - ys[before]) / run if run else 1.0
            return TimeEstimate(math.exp(ys[-1] + slope * (x - xs[-1])), self.noise, BEYOND * (x - xs[-1]))
        right = bisect.bisect_left(xs, x)
        return between(
            TimeEstimate(math.exp(ys[right - 1]), self.noise),
            TimeEstimate(math.exp(ys[right]), self.noise),
            (x - xs[right - 1]) / (xs[right] - xs[right - 1]),
        )


class Surface:
    """us over several sizes: a curve over the last, for each grid point of those before it."""

    def __init__(self, rows: Sequence[tuple[tuple[float, ...], float]]) -> None:
        """rows: (sizes, us)"""
        groups: dict[float, list[tuple[tuple[float, ...], float]]] = {}
        for sizes, us in rows:
            groups.setdefault(sizes[0], []).append((sizes[1:], us))
        self.keys = sorted(groups)
        self.parts: Mapping[float, Surface | Curve] = {
            key: Surface(group) if len(group[0][0]) > 1 else Curve([(rest[0], us) for rest, us in group])
            for key, group in groups.items()
        }

    def at(self, size: float, *rest: float) -> TimeEstimate:
        keys = self.keys
        if size <= keys[0] or size >= keys[-1]:
            end = keys[0] if size <= keys[0] else keys[-1]
            estimate = self._part(end, rest)
            beyond = abs(math.log(size / end))
            grown = max(size / end, 1.0)  # linear in it, which is what more work of the same kind takes
            return TimeEstimate(
                estimate.us * grown, estimate.noise, math.hypot(estimate.distance, BEYOND * beyond)
            )
        right = bisect.bisect_left(keys, size)
        if keys[right] == size:
            return self._part(size, rest)
        low, high = keys[right - 1], keys[right]
        u = math.log(size / low) / math.log(high / low)
        return between(self._part(low, rest), self._part(high, rest), u)

    def _part(self, key: float, rest: tuple[float, ...]) -> TimeEstimate:
        part = self.parts[key]
        return part.at(*rest) if isinstance(part, Surface) else part.at(rest[0])


def between(low: TimeEstimate, high: TimeEstimate, u: float) -> TimeEstimate:
    """At the fraction u of the way in the logarithm. The true curve lies somewhere between its ends: half
    way, within a quarter of their difference."""
    a, b = math.log(low.us), math.log(high.us)
    distance = math.hypot((1 - u) * low.distance, u * high.distance)
    return TimeEstimate(
        math.exp(a + u * (b - a)),
        (1 - u) * low.noise + u * high.noise,
        math.hypot(distance, u * (1 - u) * (b - a)),
    )


def isotonic(values: Sequence[float]) -> list[float]:
    """The growing sequence that is nearest in least squares (pool adjacent violators)."""
    pools: list[list[float]] = []  # [mean, count]
    for value in values:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, count = pools.pop()
            pools[-1] = [
                (pools[-1][0] * pools[-1][1] + mean * count) / (pools[-1][1] + count),
                pools[-1][1] + count,
            ]
    return [mean for mean, count in pools for _ in range(int(count))]
