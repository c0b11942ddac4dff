"""Statistics: intervals and verdicts from paired times. Numbers only."""

from harness.statistics.paired import Comparison, compare

__all__ = ["Comparison", "compare"]
