"""What a user concludes from a ranking: the common rule of engines that have none of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.statistics.paired import VerdictName

NEAR = 0.01


@dataclass(frozen=True)
class Ranking:
    """seconds: of a call, by the engine's own estimate; verdicts: of each callable but the baseline, about
    it."""

    seconds: Mapping[str, float]
    verdicts: Mapping[str, str]


def by_estimate(seconds: Mapping[str, float], baseline: str) -> dict[str, VerdictName]:
    """Whoever is at least 1 % from the baseline is faster or slower."""
    return {name: near_or_not(seconds[name], seconds[baseline]) for name in seconds if name != baseline}


def near_or_not(seconds: float, baseline: float) -> VerdictName:
    if max(seconds, baseline) < (1 + NEAR) * min(seconds, baseline):
        return "same"
    return "faster" if seconds < baseline else "slower"
