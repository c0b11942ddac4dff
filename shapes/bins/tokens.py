"""Tokens that a step passes through the linears and the experts: many steps to a few weighted ones."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from shapes.bins.clustering import grouped
from shapes.scheduler import Phase, Workload, simulate

MOST = 4
"""Bins of steps that only decode, and as many of those that prefill."""


class TokenBin(NamedTuple):
    """weight: share of all steps; tokens: of a step, new prompt tokens and one for each decoding request;
    prompt: the prompt tokens among them, 0 in steps that only decode."""

    weight: float
    tokens: int
    prompt: int


class _TokenPiece(NamedTuple):
    """Like steps: how many, their tokens, and the prompt tokens among these."""

    steps: int
    tokens: int
    prompt: int


@functools.cache
def token_bins(workload: Workload) -> tuple[TokenBin, ...]:
    """The steps of a workload as few bins, those that only decode first, each kind by weight."""
    return tuple(reduce_tokens(simulate(workload)))


def reduce_tokens(phases: Iterable[Phase]) -> list[TokenBin]:
    """Each bin keeps the number of steps, and their tokens to within half a token a step."""
    counts: Counter[tuple[int, int]] = Counter()
    for phase in phases:
        counts[phase.prefill + len(phase.lengths), phase.prefill] += phase.steps
    pieces = [_TokenPiece(steps, *piece) for piece, steps in counts.items()]
    decoding = [piece for piece in pieces if not piece.prompt]
    prefilling = [piece for piece in pieces if piece.prompt]
    total = sum(counts.values())
    return [
        bin_
        for kind in (decoding, prefilling)
        for bin_ in sorted((_bin(group, total) for group in grouped(kind, (_log,), MOST)), reverse=True)
    ]


def _log(piece: _TokenPiece) -> float:
    return math.log(piece.tokens)


def _bin(pieces: list[_TokenPiece], total: int) -> TokenBin:
    steps = sum(piece.steps for piece in pieces)
    tokens = sum(piece.steps * piece.tokens for piece in pieces) / steps
    prompt = sum(piece.steps * piece.prompt for piece in pieces) / steps
    return TokenBin(steps / total, round(tokens), round(prompt))
