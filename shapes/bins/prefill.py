"""Batches of prompt chunks that prefill attention sees: many steps to a few weighted ones."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shapes.bins.clustering import grouped
from shapes.bins.decode import span_of
from shapes.scheduler import Phase, Workload, simulate

MOST = 4
NEGLIGIBLE = 0.01
"""Share of the (token, attended token) pairs below which cached prefixes are left out."""


class PrefillBin(NamedTuple):
    """weight: share of the steps that prefill; batch: chunks in a step; new: tokens of a chunk, a span;
    prefix: tokens of its prompt cached before, as the mean new token sees them."""

    weight: float
    batch: int
    new: str
    prefix: str


class _PrefillPiece(NamedTuple):
    """Like steps: how many, and (new, prefix) of each chunk in them."""

    steps: int
    chunks: tuple[tuple[int, int], ...]

    @property
    def new(self) -> int:
        return sum(new for new, _ in self.chunks)

    @property
    def cached_pairs(self) -> int:
        """Pairs of a new token and a token of the cached prefix that it attends to."""
        return sum(new * prefix for new, prefix in self.chunks)

    @property
    def new_pairs(self) -> int:
        """Pairs of a new token and itself or an earlier one of its chunk."""
        return sum(new * (new + 1) // 2 for new, _ in self.chunks)


@functools.cache
def prefill_bins(workload: Workload) -> tuple[PrefillBin, ...]:
    """The steps of a workload that prefill as at most `MOST` bins, the heaviest first."""
    return tuple(reduce_chunks(simulate(workload)))


def reduce_chunks(phases: Iterable[Phase], most: int = MOST) -> list[PrefillBin]:
    """Each bin keeps the number of steps, the new tokens to within half a token a chunk, and with its prefix
    the pairs of new and cached tokens, which are the work."""
    counts: Counter[tuple[tuple[int, int], ...]] = Counter()
    for phase in phases:
        for steps, chunks in _each(phase):
            counts[chunks] += steps
    pieces = [_PrefillPiece(steps, chunks) for chunks, steps in counts.items()]
    groups = grouped(pieces, (_log_batch, _log_new, _log_seen), most)
    total = sum(counts.values())
    return sorted((_bin(group, total) for group in groups), reverse=True)


def _each(phase: Phase) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """(steps, chunks) of the phase, steps apart where the prefix grows."""
    for step in range(phase.steps if phase.chunks else 0):
        yield 1, tuple((new, prefix + step * new) for new, prefix in phase.chunks)


def _log_batch(piece: _PrefillPiece) -> float:
    return math.log(len(piece.chunks))


def _log_new(piece: _PrefillPiece) -> float:
    return math.log(piece.new / len(piece.chunks))


def _log_seen(piece: _PrefillPiece) -> float:
    """Tokens that the mean new token attends to."""
    return math.log((piece.new_pairs + piece.cached_pairs) / piece.new)


def _bin(pieces: list[_PrefillPiece], total: int) -> PrefillBin:
    steps = sum(piece.steps for piece in pieces)
    batch = round(sum(piece.steps * len(piece.chunks) for piece in pieces) / steps)
    tokens = sum(piece.steps * piece.new for piece in pieces)
    variance = sum(piece.steps * _variance(piece) for piece in pieces) / steps
    lengths = [new for piece in pieces for new, _ in piece.chunks]
    new = span_of(tokens / steps / batch, variance, batch, (min(lengths), max(lengths)))
    cached = sum(piece.steps * piece.cached_pairs for piece in pieces)
    if cached < NEGLIGIBLE * sum(piece.steps * piece.new_pairs for piece in pieces):
        cached = 0
    return PrefillBin(steps / total, batch, new, str(round(cached / tokens)))


def _variance(piece: _PrefillPiece) -> float:
    mean = piece.new / len(piece.chunks)
    return sum((new - mean) ** 2 for new, _ in piece.chunks) / len(piece.chunks)
