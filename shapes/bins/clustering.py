"""Clustering of many weighted pieces into few groups whose members lie close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

CLOSE = 0.04
"""Root mean square deviation from the group's mean below which no group is cut."""
RARE = 0.005
"""Share of the steps below which pieces get no group of their own."""


class Piece(Protocol):
    """Steps that are alike; pieces can be sorted."""

    @property
    def steps(self) -> int: ...


P = TypeVar("P", bound=Piece)
Axis = Callable[[P], float]


def grouped(pieces: list[P], axes: Sequence[Axis[P]], most: int) -> list[list[P]]:
    """Cuts where that lowers the deviation along the axes most, until pieces lie close or groups run out."""
    total = sum(piece.steps for piece in pieces)
    groups = [_Group(pieces, axes, RARE * total)] if pieces else []
    while len(groups) < most and sum(group.deviation for group in groups) > CLOSE**2 * total:
        best = max(groups, key=lambda group: group.gain)
        if not best.parts:
            break
        groups.remove(best)
        groups += [_Group(part, axes, RARE * total) for part in best.parts]
    return [group.pieces for group in groups]


class _Group(Generic[P]):
    """Pieces of one group, and the cut in two of at least `least` steps each that would gain most.

    deviation: squared distance from the mean, summed over axes and steps
    gain:      how much of it the cut removes
    """

    def __init__(self, pieces: list[P], axes: Sequence[Axis[P]], least: float) -> None:
        self.pieces = pieces
        self.deviation = 0.0
        self.gain = 0.0
        self.parts: list[list[P]] = []
        for axis in axes:
            self._try(axis, least)

    def _try(self, axis: Axis[P], least: float) -> None:
        points = sorted((axis(piece), piece) for piece in self.pieces)
        weight = sum(piece.steps for piece in self.pieces)
        mean = sum(x * piece.steps for x, piece in points) / weight
        self.deviation += sum(piece.steps * (x - mean) ** 2 for x, piece in points)
        left, moment = 0, 0.0
        for i, (x, piece) in enumerate(points[:-1], 1):
            left += piece.steps
            moment += piece.steps * (x - mean)
            gain = moment**2 * weight / (left * (weight - left))
            if gain > self.gain and min(left, weight - left) >= least:
                self.gain = gain
                self.parts = [[p for _, p in points[:i]], [p for _, p in points[i:]]]
