"""Decode steps: many to a few weighted ones that stand for them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

from shapes.bins.clustering import grouped
from shapes.lengths import span_text
from shapes.scheduler import Phase, Workload, simulate

MOST = 8
BATCH_COUNTS = 4.0
"""How much more a deviation in batch matters than one in context: kernels tile by batch."""
PIECE = 16
"""Steps of a phase taken together; their contexts differ by at most 15 tokens."""


class Bin(NamedTuple):
    """weight: share of the decode steps; batch: requests; ctx: tokens cached per request, a span."""

    weight: float
    batch: int
    ctx: str


class _DecodePiece(NamedTuple):
    """Like steps: how many, their batch, and the lengths' mean and variance over a batch, and range."""

    steps: int
    batch: int
    mean: float
    variance: float
    shortest: int
    longest: int


@functools.cache
def decode_bins(workload: Workload) -> tuple[Bin, ...]:
    """The decode steps of a workload as at most `MOST` bins, the heaviest first; simulated once."""
    return tuple(reduce_phases(simulate(workload)))


def reduce_phases(phases: Iterable[Phase], most: int = MOST) -> list[Bin]:
    """Each bin keeps the number of steps and the sum of cached tokens of those it stands for, the latter
    to within half a token a request; its span reproduces the mean spread of lengths inside a batch.
    """
    pieces = _pieces(phases)
    total = sum(piece.steps for piece in pieces)
    groups = grouped(pieces, (_log_batch, _log_mean), most)
    return sorted((_representative(group, total) for group in groups), reverse=True)


def _pieces(phases: Iterable[Phase]) -> list[_DecodePiece]:
    """The decode steps; pieces that differ in nothing, as those of waves in lockstep, are one."""
    counts: Counter[tuple[int, float, float, int, int]] = Counter()
    for phase in phases:
        if not phase.lengths:
            continue
        batch = len(phase.lengths)
        mean = sum(phase.lengths) / batch
        variance = sum(map(mul, phase.lengths, phase.lengths)) / batch - mean**2
        shortest, longest = min(phase.lengths), max(phase.lengths)
        for start in range(0, phase.steps, PIECE):
            steps = min(PIECE, phase.steps - start)
            end = start + steps - 1
            counts[batch, mean + (start + end) / 2, variance, shortest + start, longest + end] += steps
    return [_DecodePiece(steps, *piece) for piece, steps in counts.items()]


def _log_batch(piece: _DecodePiece) -> float:
    return BATCH_COUNTS * math.log(piece.batch)


def _log_mean(piece: _DecodePiece) -> float:
    return math.log(piece.mean)


def _representative(pieces: list[_DecodePiece], total: int) -> Bin:
    steps = sum(piece.steps for piece in pieces)
    batch = round(sum(piece.steps * piece.batch for piece in pieces) / steps)
    tokens = sum(piece.steps * piece.batch * piece.mean for piece in pieces) / steps
    variance = sum(piece.steps * piece.variance for piece in pieces) / steps
    seen = (min(piece.shortest for piece in pieces), max(piece.longest for piece in pieces))
    return Bin(steps / total, batch, span_of(tokens / batch, variance, batch, seen))


def span_of(mean: float, variance: float, count: int, seen: tuple[int, int]) -> str:
    """The span over which `count` lengths spread evenly have this mean, and this variance as far as
    that needs no length outside those seen."""
    # Evenly spaced, ends included: variance = width^2 (count + 1) / (12 (count - 1)).
    width = math.sqrt(12 * max(variance, 0.0) * (count - 1) / (count + 1))
    width = min(width, 2 * (mean - seen[0]), 2 * (seen[1] - mean))
    if width < 1:
        return str(round(mean))
    low = round(mean - width / 2)
    return span_text(low, max(low, round(2 * mean) - low))
