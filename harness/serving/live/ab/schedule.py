"""Order of runs: mirrored, so that a drift of the machine meets each arm alike, and paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduledRun:
    """One run to make. All turns of a pair send the same prompts."""

    pair: int
    arm: str
    seed: int


def mirrored_runs(arms: Sequence[str], pairs: int, seed: int) -> list[list[ScheduledRun]]:
    """Of each pair its turns, in order: AB, BA, AB ... (ABC, CBA, ...)."""
    return [
        [ScheduledRun(pair, arm, seed + pair) for arm in (arms if pair % 2 == 0 else arms[::-1])]
        for pair in range(pairs)
    ]
