"""Interpolation between the points of a table of times.

Times grow with the work, so a measured curve that falls is noise: it is replaced by its isotonic regression
in the logarithm (pool adjacent violators). Between points the logarithm of the time is linear in the
logarithm of the size.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

BEYOND = 3.0
"""A factor beyond a table's sizes, up to which its times are taken to hold."""


class Curve:
    """us over one size, both positive; at least one point."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        points = sorted(points)
        self.sizes = [math.log(x) for x, _ in points]
        self.times = isotonic([math.log(y) for _, y in points])

    def at(self, size: float) -> float:
        """Below the sizes the least one's time; beyond them it grows as over their last factor of 1.6."""
        x, xs, ys = math.log(max(size, 1e-9)), self.sizes, self.times
        if x <= xs[0]:
            return math.exp(ys[0])
        if x > xs[-1]:
            before = max((i for i in range(len(xs)) if xs[i] < xs[-1] - 0.5), default=0)
            run = xs[-1] - xs[before]
            slope = (ys[-1] - ys[before]) / run if run else 1.0
            return math.exp(ys[-1] + slope * (x - xs[-1]))
        right = bisect.bisect_left(xs, x)
        u = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
        return math.exp((1 - u) * ys[right - 1] + u * ys[right])


class Surface:
    """us over several sizes: a curve over the last, for each grid point of those before it."""

    def __init__(self, rows: Sequence[tuple[tuple[float, ...], float]]) -> None:
        """rows: (sizes, us)"""
        columns = list(zip(*(sizes for sizes, _ in rows), strict=True))
        self.ends = [(min(column), max(column)) for column in columns]
        groups: dict[float, list[tuple[tuple[float, ...], float]]] = {}
        for sizes, us in rows:
            groups.setdefault(sizes[0], []).append((sizes[1:], us))
        self.keys = sorted(groups)
        self.parts: Mapping[float, Surface | Curve] = {
            key: Surface(group) if len(group[0][0]) > 1 else Curve([(rest[0], us) for rest, us in group])
            for key, group in groups.items()
        }

    def covers(self, *sizes: float) -> bool:
        """Whether none is beyond those of the table by a factor of BEYOND."""
        pairs = zip(sizes, self.ends, strict=True)
        return all(least / BEYOND <= size <= most * BEYOND for size, (least, most) in pairs)

    def at(self, size: float, *rest: float) -> float:
        keys = self.keys
        if size <= keys[0]:
            return self.parts[keys[0]].at(*rest)
        if size >= keys[-1]:
            return self.parts[keys[-1]].at(*rest) * size / keys[-1]  # more work of the same kind
        right = bisect.bisect_left(keys, size)
        if keys[right] == size:
            return self.parts[size].at(*rest)
        low, high = keys[right - 1], keys[right]
        u = math.log(size / low) / math.log(high / low)
        return self.parts[low].at(*rest) ** (1 - u) * self.parts[high].at(*rest) ** u


def isotonic(values: Sequence[float]) -> list[float]:
    """The growing sequence that is nearest in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [mean for mean, count in pools for _ in range(count)]
