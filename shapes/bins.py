"""The steps of a workload, reduced to a few weighted bins that stand for them.

Each function simulates a workload once and returns its bins, the heaviest first.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from shapes.lengths import span_text
from shapes.scheduler import Phase, Workload, simulate

MOST_DECODE_BINS = 8
MOST_BINS = 4
"""The most bins of steps that prefill; in `token_bins` also the most bins of steps that only decode."""
CLOSE = 0.04
"""Groups of steps are cut until their steps are so close to the mean of their group, in root mean square. The
distance of two steps is that of logarithms, such as those of their tokens: 0.04 is about 4 percent."""
RARE = 0.005  # the least share of the steps that a group has
BATCH_WEIGHT = 4.0
"""How much more the batch of a decode step counts than its context: kernels choose their tiles by batch."""
STEPS_TOGETHER = 16  # steps of a phase that form one piece; their contexts differ by at most 15 tokens
NEGLIGIBLE = 0.01
"""A bin has no prefix where pairs with a cached token are less than this share of pairs of new tokens."""


class DecodeBin(NamedTuple):
    weight: float
    batch: int
    ctx: str  # cached tokens of each request, a span (see shapes.lengths)


class PrefillBin(NamedTuple):
    weight: float
    batch: int  # prompt chunks in a step
    new: str  # tokens of a chunk, a span
    prefix: str  # tokens of its prompt that were cached before, the mean over the new tokens


class TokenBin(NamedTuple):
    weight: float
    tokens: int  # tokens of a step: new prompt tokens, and one for each decoding request
    prompt: int  # the prompt tokens among them; 0 in steps that only decode


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


def reduce_phases(phases: Iterable[Phase], most: int = MOST_DECODE_BINS) -> list[DecodeBin]:
    """The bins of the steps that decode. A bin has the weight of its steps, and as many cached tokens as they
    have, to within half a token for each request. Its span has the mean variance of the lengths within their
    batches."""
    pieces: Counter[_DecodePiece] = Counter()  # counted in steps
    for phase in phases:
        if not phase.lengths:
            continue
        batch = len(phase.lengths)
        mean = sum(phase.lengths) / batch
        variance = sum(length * length for length in phase.lengths) / batch - mean**2
        shortest, longest = min(phase.lengths), max(phase.lengths)
        for start in range(0, phase.steps, STEPS_TOGETHER):
            steps = min(STEPS_TOGETHER, phase.steps - start)
            end = start + steps - 1
            middle = mean + (start + end) / 2
            pieces[_DecodePiece(batch, middle, variance, shortest + start, longest + end)] += steps
    groups = grouped(pieces, lambda piece: (BATCH_WEIGHT * math.log(piece.batch), math.log(piece.mean)), most)
    return sorted((_decode_bin(group, pieces.total()) for group in groups), reverse=True)


def _decode_bin(group: Counter[_DecodePiece], total_steps: int) -> DecodeBin:
    batch = round(_mean(group, lambda piece: piece.batch))
    tokens = _mean(group, lambda piece: piece.batch * piece.mean)
    variance = _mean(group, lambda piece: piece.variance)
    seen = (min(piece.shortest for piece in group), max(piece.longest for piece in group))
    return DecodeBin(group.total() / total_steps, batch, span_of(tokens / batch, variance, batch, seen))


class _PrefillPiece(NamedTuple):
    chunks: tuple[tuple[int, int], ...]  # those that the steps prefill, each (new, prefix)

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
        """The logarithms of three numbers: chunks, new tokens of a chunk, and pairs of a new token."""
        mean_new = self.new / len(self.chunks)
        pairs = (self.new_pairs + self.cached_pairs) / self.new
        return math.log(len(self.chunks)), math.log(mean_new), math.log(pairs)


def reduce_chunks(phases: Iterable[Phase], most: int = MOST_BINS) -> list[PrefillBin]:
    """The bins of the steps that prefill. A bin has the weight of its steps. It has as many new tokens as
    they have, to within half a token for each chunk, and as many pairs of a new and a cached token."""
    pieces: Counter[_PrefillPiece] = Counter()  # counted in steps
    for phase in phases:
        if not phase.chunks:
            continue
        for step in range(phase.steps):
            pieces[_PrefillPiece(tuple((new, prefix + step * new) for new, prefix in phase.chunks))] += 1
    groups = grouped(pieces, lambda piece: piece.place, most)
    return sorted((_prefill_bin(group, pieces.total()) for group in groups), reverse=True)


def _prefill_bin(group: Counter[_PrefillPiece], total_steps: int) -> PrefillBin:
    batch = round(_mean(group, lambda piece: len(piece.chunks)))
    tokens = _mean(group, lambda piece: piece.new)
    variance = _mean(group, lambda piece: piece.variance)
    lengths = [new for piece in group for new, _ in piece.chunks]
    new = span_of(tokens / batch, variance, batch, (min(lengths), max(lengths)))
    cached = _mean(group, lambda piece: piece.cached_pairs)
    if cached < NEGLIGIBLE * _mean(group, lambda piece: piece.new_pairs):
        cached = 0
    return PrefillBin(group.total() / total_steps, batch, new, str(round(cached / tokens)))


class _TokenPiece(NamedTuple):
    """Steps with the same numbers of tokens (see TokenBin)."""

    tokens: int
    prompt: int


def reduce_tokens(phases: Iterable[Phase]) -> list[TokenBin]:
    """Returns the bins of the steps that only decode, then those of the other steps. A bin has the weight of
    its steps, and as many tokens as they have, to within half a token for each step."""
    decoding: Counter[_TokenPiece] = Counter()  # counted in steps
    prefilling: Counter[_TokenPiece] = Counter()
    for phase in phases:
        pieces = prefilling if phase.prefill else decoding
        pieces[_TokenPiece(phase.prefill + len(phase.lengths), phase.prefill)] += phase.steps
    total_steps = decoding.total() + prefilling.total()
    bins = []
    for pieces in (decoding, prefilling):
        groups = grouped(pieces, lambda piece: (math.log(piece.tokens),), MOST_BINS)
        bins += sorted((_token_bin(group, total_steps) for group in groups), reverse=True)
    return bins


def _token_bin(group: Counter[_TokenPiece], total_steps: int) -> TokenBin:
    tokens = round(_mean(group, lambda piece: piece.tokens))
    prompt = round(_mean(group, lambda piece: piece.prompt))
    return TokenBin(group.total() / total_steps, tokens, prompt)


P = TypeVar("P", bound=tuple[object, ...])


def _mean(pieces: Counter[P], value: Callable[[P], float]) -> float:
    """The mean of a value over all steps."""
    return sum(steps * value(piece) for piece, steps in pieces.items()) / pieces.total()


def grouped(pieces: Counter[P], place: Callable[[P], tuple[float, ...]], most: int) -> list[Counter[P]]:
    """Cuts pieces, counted in steps, into at most `most` groups. place: returns the coordinates of a piece.
    Each cut is the one that reduces the deviation from the means of the groups most, until CLOSE."""
    total_steps = pieces.total()
    least_steps = RARE * total_steps
    groups = [_group_of(pieces, place, least_steps)] if pieces else []
    while len(groups) < most and sum(group.deviation for group in groups) > CLOSE**2 * total_steps:
        best = max(groups, key=lambda group: group.gain)
        if not best.halves:
            break
        groups.remove(best)
        groups += [_group_of(half, place, least_steps) for half in best.halves]
    return [group.pieces for group in groups]


@dataclass
class _Group(Generic[P]):
    """A group and the cut that would reduce its deviation most."""

    pieces: Counter[P]
    deviation: float = 0.0  # the squared distance from the mean, summed over axes and steps
    gain: float = 0.0  # how much of the deviation the cut removes
    halves: tuple[Counter[P], ...] = ()  # the two groups that the cut makes; empty where no cut is possible


def _group_of(pieces: Counter[P], place: Callable[[P], tuple[float, ...]], least_steps: float) -> _Group[P]:
    """The group of these pieces. Its best cut, on one axis, leaves `least_steps` steps on either side."""
    group = _Group(pieces)
    total_steps = pieces.total()
    for coordinates in zip(*map(place, pieces), strict=True):  # those of all pieces on one axis
        points = sorted(zip(coordinates, pieces.values(), pieces, strict=True))
        mean = sum(x * steps for x, steps, _ in points) / total_steps
        group.deviation += sum(steps * (x - mean) ** 2 for x, steps, _ in points)
        left_steps = 0  # left of the cut
        moment = 0.0  # their distances from the mean, summed
        for cut, (x, steps, _) in enumerate(points[:-1], 1):
            left_steps += steps
            right_steps = total_steps - left_steps
            moment += steps * (x - mean)
            # left_steps * right_steps / total_steps, times the squared distance of the two means
            gain = moment**2 * total_steps / (left_steps * right_steps)
            if gain > group.gain and min(left_steps, right_steps) >= least_steps:
                sides = (points[:cut], points[cut:])
                group.gain = gain
                group.halves = tuple(Counter({piece: steps for _, steps, piece in side}) for side in sides)
    return group


def span_of(mean: float, variance: float, count: int, seen: tuple[int, int]) -> str:
    """The span over which `count` lengths, spread evenly, have this mean and this variance. It stays within
    the lengths that were seen, (shortest, longest), even if the variance is then smaller."""
    shortest, longest = seen
    # Of lengths at equal distances, ends included: variance = width^2 (count + 1) / (12 (count - 1)).
    width = math.sqrt(12 * max(variance, 0.0) * (count - 1) / (count + 1))
    width = min(width, 2 * (mean - shortest), 2 * (longest - mean))
    if width < 1:
        return str(round(mean))
    low = round(mean - width / 2)
    return span_text(low, max(low, round(2 * mean) - low))
