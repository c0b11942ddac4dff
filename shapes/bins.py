"""The steps of a workload, reduced to a few weighted bins that stand for them.

Each function simulates a workload once and returns its bins, the heaviest first.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Generic, NamedTuple, Protocol, TypeVar

from shapes.lengths import span_text
from shapes.scheduler import Phase, Workload, simulate

MOST_DECODE = 8
"""The most bins of decode steps."""
MOST = 4
"""The most bins of steps that prefill; and the most of each kind of step in `token_bins`."""
CLOSE = 0.04
"""The root mean square deviation from a group's mean below which no group is cut."""
RARE = 0.005
"""The share of the steps below which pieces get no group of their own."""
BATCH_COUNTS = 4.0
"""How much more a deviation in the batch of a decode step counts than one in context: kernels tile by
batch."""
STEPS_TOGETHER = 16
"""Steps of a phase that form one piece; their contexts differ by at most 15 tokens."""
NEGLIGIBLE = 0.01
"""The share of the (token, attended token) pairs below which cached prefixes are left out."""


class DecodeBin(NamedTuple):
    weight: float
    """The share of the decode steps."""
    batch: int
    """Requests."""
    ctx: str
    """Cached tokens of each request, a span (see shapes.lengths)."""


class PrefillBin(NamedTuple):
    weight: float
    """The share of the steps that prefill."""
    batch: int
    """Prompt chunks in a step."""
    new: str
    """Tokens of a chunk, a span."""
    prefix: str
    """Tokens of its prompt that were cached before, as the mean new token sees them."""


class TokenBin(NamedTuple):
    weight: float
    """The share of all steps."""
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

    steps: int
    batch: int
    mean: float
    variance: float
    shortest: int
    longest: int


def reduce_phases(phases: Iterable[Phase], most: int = MOST_DECODE) -> list[DecodeBin]:
    """Each bin keeps the number of its steps and the sum of their cached tokens, the latter to within half a
    token for each request. Its span has the mean variance of the lengths within a batch."""
    # Pieces that are equal, as those of waves in lockstep, become one.
    counts: Counter[tuple[int, float, float, int, int]] = Counter()
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
            counts[batch, mean + (start + end) / 2, variance, shortest + start, longest + end] += steps
    pieces = [_DecodePiece(steps, *piece) for piece, steps in counts.items()]
    axes = (lambda piece: BATCH_COUNTS * math.log(piece.batch), lambda piece: math.log(piece.mean))
    groups = grouped(pieces, axes, most)
    return sorted((_decode_bin(group, sum(counts.values())) for group in groups), reverse=True)


def _decode_bin(pieces: list[_DecodePiece], total: int) -> DecodeBin:
    steps = sum(piece.steps for piece in pieces)
    batch = round(_sum(pieces, lambda piece: piece.batch) / steps)
    tokens = sum(piece.steps * piece.batch * piece.mean for piece in pieces) / steps
    variance = _sum(pieces, lambda piece: piece.variance) / steps
    seen = (min(piece.shortest for piece in pieces), max(piece.longest for piece in pieces))
    return DecodeBin(steps / total, batch, span_of(tokens / batch, variance, batch, seen))


class _PrefillPiece(NamedTuple):
    """Steps that prefill the same chunks, each (new, prefix)."""

    steps: int
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


def reduce_chunks(phases: Iterable[Phase], most: int = MOST) -> list[PrefillBin]:
    """Each bin keeps the number of its steps, their new tokens to within half a token for each chunk, and
    with its prefix the pairs of new and cached tokens, which are the work."""
    counts: Counter[tuple[tuple[int, int], ...]] = Counter()
    for phase in phases:
        for step in range(phase.steps if phase.chunks else 0):
            counts[tuple((new, prefix + step * new) for new, prefix in phase.chunks)] += 1
    pieces = [_PrefillPiece(steps, chunks) for chunks, steps in counts.items()]
    axes = (
        lambda piece: math.log(len(piece.chunks)),
        lambda piece: math.log(piece.new / len(piece.chunks)),
        lambda piece: math.log((piece.new_pairs + piece.cached_pairs) / piece.new),
    )
    groups = grouped(pieces, axes, most)
    return sorted((_prefill_bin(group, sum(counts.values())) for group in groups), reverse=True)


def _prefill_bin(pieces: list[_PrefillPiece], total: int) -> PrefillBin:
    steps = sum(piece.steps for piece in pieces)
    batch = round(_sum(pieces, lambda piece: len(piece.chunks)) / steps)
    tokens = _sum(pieces, lambda piece: piece.new)
    variance = _sum(pieces, lambda piece: piece.variance) / steps
    lengths = [new for piece in pieces for new, _ in piece.chunks]
    new = span_of(tokens / steps / batch, variance, batch, (min(lengths), max(lengths)))
    cached = _sum(pieces, lambda piece: piece.cached_pairs)
    if cached < NEGLIGIBLE * _sum(pieces, lambda piece: piece.new_pairs):
        cached = 0
    return PrefillBin(steps / total, batch, new, str(round(cached / tokens)))


class _TokenPiece(NamedTuple):
    """Steps with the same number of tokens, `prompt` of which are of prompts."""

    steps: int
    tokens: int
    prompt: int


def reduce_tokens(phases: Iterable[Phase]) -> list[TokenBin]:
    """Each bin keeps the number of its steps, and their tokens to within half a token for each step."""
    counts: Counter[tuple[int, int]] = Counter()
    for phase in phases:
        counts[phase.prefill + len(phase.lengths), phase.prefill] += phase.steps
    pieces = [_TokenPiece(steps, *piece) for piece, steps in counts.items()]
    bins = []
    for prefills in (False, True):
        kind = [piece for piece in pieces if bool(piece.prompt) == prefills]
        groups = grouped(kind, (lambda piece: math.log(piece.tokens),), MOST)
        bins += sorted((_token_bin(group, sum(counts.values())) for group in groups), reverse=True)
    return bins


def _token_bin(pieces: list[_TokenPiece], total: int) -> TokenBin:
    steps = sum(piece.steps for piece in pieces)
    tokens = _sum(pieces, lambda piece: piece.tokens) / steps
    prompt = _sum(pieces, lambda piece: piece.prompt) / steps
    return TokenBin(steps / total, round(tokens), round(prompt))


class Piece(Protocol):
    """Steps that are alike. Pieces of one type can be sorted."""

    @property
    def steps(self) -> int: ...


P = TypeVar("P", bound=Piece)
Axis = Callable[[P], float]


def _sum(pieces: list[P], value: Axis[P]) -> float:
    """The sum of a value over all steps."""
    return sum(piece.steps * value(piece) for piece in pieces)


def grouped(pieces: list[P], axes: Sequence[Axis[P]], most: int) -> list[list[P]]:
    """Cuts the pieces into at most `most` groups, each time where that reduces the deviation along the axes
    most. It stops once all pieces lie close to the mean of their group."""
    total = sum(piece.steps for piece in pieces)
    groups = [_group(pieces, axes, RARE * total)] if pieces else []
    while len(groups) < most and sum(group.deviation for group in groups) > CLOSE**2 * total:
        best = max(groups, key=lambda group: group.gain)
        if not best.parts:
            break
        groups.remove(best)
        groups += [_group(part, axes, RARE * total) for part in best.parts]
    return [group.pieces for group in groups]


@dataclass
class _Group(Generic[P]):
    pieces: list[P]
    deviation: float
    """The squared distance from the mean, summed over axes and steps."""
    gain: float
    """How much of the deviation the best cut removes."""
    parts: list[list[P]]
    """The two groups of the best cut; empty where no cut is possible."""


def _group(pieces: list[P], axes: Sequence[Axis[P]], least: float) -> _Group[P]:
    """Finds the best cut into two groups of at least `least` steps each."""
    group = _Group(pieces, 0.0, 0.0, [])
    weight = sum(piece.steps for piece in pieces)
    for axis in axes:
        points = sorted((axis(piece), piece) for piece in pieces)
        mean = sum(x * piece.steps for x, piece in points) / weight
        group.deviation += sum(piece.steps * (x - mean) ** 2 for x, piece in points)
        left, moment = 0, 0.0
        for i, (x, piece) in enumerate(points[:-1], 1):
            left += piece.steps
            moment += piece.steps * (x - mean)
            gain = moment**2 * weight / (left * (weight - left))
            if gain > group.gain and min(left, weight - left) >= least:
                group.gain = gain
                group.parts = [[p for _, p in points[:i]], [p for _, p in points[i:]]]
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
