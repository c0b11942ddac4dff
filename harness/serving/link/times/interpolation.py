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


class Surface:
    """us over one or more positive sizes: a curve over the last, for each grid point of those before it."""

    def __init__(self, points: Mapping[tuple[float, ...], float]) -> None:
        """points: sizes to us; at least one"""
        self.ends = [(min(column), max(column)) for column in zip(*points, strict=True)]
        groups: dict[float, dict[tuple[float, ...], float]] = {}
        for (size, *rest), us in sorted(points.items()):
            groups.setdefault(size, {})[tuple(rest)] = us
        self.sizes = [*groups]
        if len(self.ends) == 1:
            self.times = isotonic([group[()] for group in groups.values()])
        else:
            self.parts = [Surface(group) for group in groups.values()]

    def covers(self, *sizes: float) -> bool:
        """Whether none is beyond those of the table by a factor of BEYOND."""
        pairs = zip(sizes, self.ends, strict=True)
        return all(least / BEYOND <= size <= most * BEYOND for size, (least, most) in pairs)

    def at(self, size: float, *rest: float) -> float:
        """Below the least size its time. Beyond the sizes a curve grows as over their last factor of 1.6, and
        a surface as the size does: it is more work of the same kind."""
        sizes = self.sizes
        if size <= sizes[0]:
            return self._us(0, rest)
        if size > sizes[-1]:
            return self._us(-1, rest) * (size / sizes[-1]) ** (1.0 if rest else self._slope())
        right = bisect.bisect_left(sizes, size)
        if sizes[right] == size:
            return self._us(right, rest)
        u = math.log(size / sizes[right - 1]) / math.log(sizes[right] / sizes[right - 1])
        return self._us(right - 1, rest) ** (1 - u) * self._us(right, rest) ** u

    def _us(self, point: int, rest: tuple[float, ...]) -> float:
        return self.parts[point].at(*rest) if rest else self.times[point]

    def _slope(self) -> float:
        """Of the end of a curve, in logarithms; 1 where it has one point."""
        least = self.sizes[-1] / math.exp(0.5)
        before = max((i for i, size in enumerate(self.sizes) if size < least), default=0)
        run = math.log(self.sizes[-1] / self.sizes[before])
        return math.log(self.times[-1] / self.times[before]) / run if run else 1.0


def isotonic(times: Sequence[float]) -> list[float]:
    """The growing times whose logarithms are nearest in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean of the logarithms, count
    for time in times:
        pools.append((math.log(time), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [math.exp(mean) for mean, count in pools for _ in range(count)]
