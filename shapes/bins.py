"""The steps of a workload, reduced to a few weighted bins that stand for them.

Each function simulates a workload once and returns its bins, the heaviest first.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import mul
from typing import Generic, NamedTuple, TypeVar

from shapes.lengths import span_text
from shapes.scheduler import Phase, Workload, simulate

MOST_DECODE = 8
MOST = 4
"""The most bins of steps that prefill; and the most of each kind of step in `token_bins`."""
CLOSE = 0.04
"""The root mean square deviation from a group's mean below which no group is cut."""
RARE = 0.005
"""The share of the steps below which pieces get no group of their own."""
BATCH_COUNTS = 4.0
"""How much more a deviation in a decode step's batch counts than one in context: kernels tile by batch."""
STEPS_TOGETHER = 16
"""Steps of a phase that form one piece; their contexts differ by at most 15 tokens."""
NEGLIGIBLE = 0.01
"""The share of the (token, attended token) pairs below which cached prefixes are left out."""


class DecodeBin(NamedTuple):
    weight: float
    batch: int
    ctx: str
    """Cached tokens of each request, a span (see shapes.lengths)."""


class PrefillBin(NamedTuple):
    weight: float
    batch: int
    """Prompt chunks in a step."""
    new: str
    """Tokens of a chunk, a span."""
    prefix: str
    """Tokens of its prompt that were cached before, as the mean new token sees them."""


class TokenBin(NamedTuple):
    weight: float
    tokens: int
    """Tokens of a step: new prompt tokens, and one for each decoding request."""
    prompt: int
    """The prompt tokens among them; 0 in steps that only decode."""


@functools.cache
def decode_bins(workload: Workload) -> tuple[DecodeBin, ...]:
    return tuple(reduce_phases(simulate(workload)))


@functools.cache
def prefill_bins(workload: Workload) -> tuple[PrefillBin, ...]:
    return tuple(reduce_chunks(simulate(workload)))


@functools.cache
def token_bins(workload: Workload) -> tuple[TokenBin, ...]:
    """The bins of all steps: first of those that only decode, then of the others."""
    return tuple(reduce_tokens(simulate(workload)))


class _DecodePiece(NamedTuple):
    """Decode steps that are alike, with the mean, variance and range of the lengths of their batch."""

    batch: int
    mean: float
    variance: float
    shortest: int
    longest: int


def reduce_phases(phases: Iterable[Phase], most: int = MOST_DECODE) -> list[DecodeBin]:
    """Each bin keeps the number of its steps and the sum of their cached tokens, the latter to within half a
    token for each request. Its span has the mean variance of the lengths within a batch."""
    # Pieces that are equal, as those of waves in lockstep, become one.
    pieces: Counter[_DecodePiece] = Counter()
    for phase in phases:
        if not phase.lengths:
            continue
        batch = len(phase.lengths)
        mean = sum(phase.lengths) / batch
        variance = sum(map(mul, phase.lengths, phase.lengths)) / batch - mean**2
        shortest, longest = min(phase.lengths), max(phase.lengths)
        for start in range(0, phase.steps, STEPS_TOGETHER):
            steps = min(STEPS_TOGETHER, phase.steps - start)
            end = start + steps - 1
            middle = mean + (start + end) / 2
            pieces[_DecodePiece(batch, middle, variance, shortest + start, longest + end)] += steps
    groups = grouped(pieces, lambda piece: (BATCH_COUNTS * math.log(piece.batch), math.log(piece.mean)), most)
    return sorted((_decode_bin(group, pieces.total()) for group in groups), reverse=True)


def _decode_bin(group: Counter[_DecodePiece], total: int) -> DecodeBin:
    batch = round(_mean(group, lambda piece: piece.batch))
    tokens = _mean(group, lambda piece: piece.batch * piece.mean)
    variance = _mean(group, lambda piece: piece.variance)
    seen = (min(piece.shortest for piece in group), max(piece.longest for piece in group))
    return DecodeBin(group.total() / total, batch, span_of(tokens / batch, variance, batch, seen))


class _PrefillPiece(NamedTuple):
    """Steps that prefill the same chunks, each (new, prefix)."""

    chunks: tuple[tuple[int, int], ...]

    @property
    def new(self) -> int:
        return sum(new for new, _ in self.chunks)

    @property
    def variance(self) -> float:
        """The variance of the new tokens of its chunks."""
        mean = self.new / len(self.chunks)
        return sum((new - mean) ** 2 for new, _ in self.chunks) / len(self.chunks)

    @property
    def cached_pairs(self) -> int:
        """Pairs of a new token and a token of the cached prefix that it attends to."""
        return sum(new * prefix for new, prefix in self.chunks)

    @property
    def new_pairs(self) -> int:
        """Pairs of a new token and itself or an earlier token of its chunk."""
        return sum(new * (new + 1) // 2 for new, _ in self.chunks)

    @property
    def place(self) -> tuple[float, float, float]:
        """The logarithms of the chunks, of the new tokens of a chunk, and of the pairs of a new token."""
        mean = self.new / len(self.chunks)
        pairs = (self.new_pairs + self.cached_pairs) / self.new
        return math.log(len(self.chunks)), math.log(mean), math.log(pairs)


def reduce_chunks(phases: Iterable[Phase], most: int = MOST) -> list[PrefillBin]:
    """Each bin keeps the number of its steps, their new tokens to within half a token for each chunk, and
    with its prefix the pairs of new and cached tokens, which are the work."""
    pieces: Counter[_PrefillPiece] = Counter()
    for phase in phases:
        for step in range(phase.steps if phase.chunks else 0):
            pieces[_PrefillPiece(tuple((new, prefix + step * new) for new, prefix in phase.chunks))] += 1
    groups = grouped(pieces, lambda piece: piece.place, most)
    return sorted((_prefill_bin(group, pieces.total()) for group in groups), reverse=True)


def _prefill_bin(group: Counter[_PrefillPiece], total: int) -> PrefillBin:
    batch = round(_mean(group, lambda piece: len(piece.chunks)))
    tokens = _mean(group, lambda piece: piece.new)
    variance = _mean(group, lambda piece: piece.variance)
    lengths = [new for piece in group for new, _ in piece.chunks]
    new = span_of(tokens / batch, variance, batch, (min(lengths), max(lengths)))
    cached = _mean(group, lambda piece: piece.cached_pairs)
    if cached < NEGLIGIBLE * _mean(group, lambda piece: piece.new_pairs):
        cached = 0
    return PrefillBin(group.total() / total, batch, new, str(round(cached / tokens)))


def reduce_tokens(phases: Iterable[Phase]) -> list[TokenBin]:
    """Each bin keeps the number of its steps, and their tokens to within half a token for each step."""
    pieces: Counter[tuple[int, int]] = Counter()  # (tokens, those of prompts among them)
    for phase in phases:
        pieces[phase.prefill + len(phase.lengths), phase.prefill] += phase.steps
    bins = []
    for prefills in (False, True):
        kind = Counter({piece: steps for piece, steps in pieces.items() if bool(piece[1]) == prefills})
        bins += sorted(
            (
                TokenBin(
                    group.total() / pieces.total(),
                    round(_mean(group, lambda piece: piece[0])),
                    round(_mean(group, lambda piece: piece[1])),
                )
                for group in grouped(kind, lambda piece: (math.log(piece[0]),), MOST)
            ),
            reverse=True,
        )
    return bins


P = TypeVar("P", bound=tuple[object, ...])


def _mean(pieces: Counter[P], value: Callable[[P], float]) -> float:
    """The mean of a value over all steps."""
    return sum(steps * value(piece) for piece, steps in pieces.items()) / pieces.total()


def grouped(pieces: Counter[P], place: Callable[[P], tuple[float, ...]], most: int) -> list[Counter[P]]:
    """Cuts the pieces into at most `most` groups, each time where that reduces the deviation of their places
    most. It stops once all pieces lie close to the mean of their group."""
    total = pieces.total()
    groups = [_group(pieces, place, RARE * total)] if pieces else []
    while len(groups) < most and sum(group.deviation for group in groups) > CLOSE**2 * total:
        best = max(groups, key=lambda group: group.gain)
        if not best.parts:
            break
        groups.remove(best)
        groups += [_group(part, place, RARE * total) for part in best.parts]
    return [group.pieces for group in groups]


@dataclass
class _Group(Generic[P]):
    pieces: Counter[P]
    deviation: float
    """The squared distance from the mean, summed over axes and steps."""
    gain: float
    """How much of the deviation the best cut removes."""
    parts: list[Counter[P]]
    """The two groups of the best cut; empty where no cut is possible."""


def _group(pieces: Counter[P], place: Callable[[P], tuple[float, ...]], least: float) -> _Group[P]:
    """Finds the best cut into two groups of at least `least` steps each."""
    group = _Group(pieces, 0.0, 0.0, [])
    weight = pieces.total()
    for coordinates in zip(*map(place, pieces), strict=True):
        points = sorted(
            (x, steps, piece) for x, (piece, steps) in zip(coordinates, pieces.items(), strict=True)
        )
        mean = sum(x * steps for x, steps, _ in points) / weight
        group.deviation += sum(steps * (x - mean) ** 2 for x, steps, _ in points)
        left, moment = 0, 0.0
        for i, (x, steps, _) in enumerate(points[:-1], 1):
            left += steps
            moment += steps * (x - mean)
            gain = moment**2 * weight / (left * (weight - left))
            if gain > group.gain and min(left, weight - left) >= least:
                parts = (points[:i], points[i:])
                group.gain = gain
                group.parts = [Counter({piece: steps for _, steps, piece in part}) for part in parts]
    return group


def span_of(mean: float, variance: float, count: int, seen: tuple[int, int]) -> str:
    """The span over which `count` lengths, spread evenly, have this mean and this variance. It stays within
    the lengths that were seen, even if the variance is then smaller."""
    # Of lengths at equal distances, ends included: variance = width^2 (count + 1) / (12 (count - 1)).
    width = math.sqrt(12 * max(variance, 0.0) * (count - 1) / (count + 1))
    width = min(width, 2 * (mean - seen[0]), 2 * (seen[1] - mean))
    if width < 1:
        return str(round(mean))
    low = round(mean - width / 2)
    return span_text(low, max(low, round(2 * mean) - low))
