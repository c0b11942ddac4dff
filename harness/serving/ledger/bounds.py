"""Bounds without a model: of one change, from one observation or one share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.serving.ledger.prediction import KernelChange


@dataclass(frozen=True)
class ChangeBound:
    """Of one change alone, from a time before and one after.

    least_share:    of the time before that its op had at least; possible_alone: between 0 and 1
    most_worth:     factor by which the whole gets faster were that share to vanish
    """

    op: str
    factor: float
    before_ms: float
    after_ms: float
    least_share: float
    possible_alone: bool
    most_worth: float | None


def bounds(before_ms: float, after_ms: float, changes: Sequence[KernelChange]) -> list[ChangeBound]:
    """Of each change that gives a factor."""
    shares = [
        (change.op, change.factor, least_share(before_ms, after_ms, change.factor))
        for change in changes
        if change.factor
    ]
    return [
        ChangeBound(
            op,
            factor,
            before_ms,
            after_ms,
            share,
            possible_alone=0 <= share <= 1,
            most_worth=most_worth(share) if 0 <= share < 1 else None,
        )
        for op, factor, share in shares
    ]


def least_share(before: float, after: float, factor: float) -> float:
    """Share of the time before that the changed kernels had at least, if only they changed, `factor` times
    faster: (1 - T1/T0) / (1 - 1/r). Over 1: they alone cannot explain it. Both times in one unit."""
    if before <= 0 or after <= 0:
        raise UsageError(f"times of {before:g} and {after:g} are to be above 0")
    if factor <= 0 or factor == 1:
        raise UsageError(f"a factor of {factor:g} changes nothing that could be seen")
    if math.isinf(factor):
        return 1 - after / before
    return (1 - after / before) / (1 - 1 / factor)


def most_worth(share: float) -> float:
    """The largest factor by which the whole gets faster were that share of it to vanish: 1 / (1 - share)."""
    if not 0 <= share <= 1:
        raise UsageError(f"a share of {share:g} is not between 0 and 1")
    return math.inf if share == 1 else 1 / (1 - share)


def saved_per_call_us(before_ms: float, after_ms: float, calls: int) -> float:
    """Microseconds that each of a step's calls saved, if they alone changed and nothing hid them."""
    return (before_ms - after_ms) / calls * 1e3
