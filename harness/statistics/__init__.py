"""Statistics: intervals and verdicts from paired times. It knows numbers only."""

from harness.statistics.paired import Comparison, compare

__all__ = ["Comparison", "compare"]
