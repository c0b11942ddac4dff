"""Effect of an arm, from pairs of runs: Student's t over the pairs' differences.

A pair's runs send the same prompts, one after the other, so a drift between pairs cancels. A bootstrap over
so few pairs covers too seldom (seen with 4), so the interval is Student's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.statistics.intervals import CONFIDENCE, mean_half_width

# An effect below this share of the step is not called resolved, whatever its interval: neighbours' caches and
# the drift of a machine are of that size.
RESOLVED = 0.03


@dataclass(frozen=True)
class ArmEffect:
    """arm minus base, in the unit of the values; `low`, `high`: the interval; `base`: mean of the base."""

    pairs: int
    base: float
    arm: float
    change: float
    low: float
    high: float
    confidence: float

    @property
    def share(self) -> float:
        return self.change / self.base if self.base else math.nan

    @property
    def resolved(self) -> bool:
        return not self.low <= 0 <= self.high and abs(self.share) >= RESOLVED

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share, "resolved": self.resolved}


def effect(base: Sequence[float], arm: Sequence[float], confidence: float = CONFIDENCE) -> ArmEffect | None:
    """None without a pair; of a single one the interval is infinite."""
    if not base or len(base) != len(arm):
        return None
    differences = [b - a for a, b in zip(base, arm, strict=True)]
    mean, half = statistics.fmean(differences), mean_half_width(differences, confidence)
    return ArmEffect(
        len(base), statistics.fmean(base), statistics.fmean(arm), mean, mean - half, mean + half, confidence
    )
