"""Intervals and verdicts from paired times. This package knows numbers only."""

from harness.statistics.paired import Comparison, compare

__all__ = ["Comparison", "compare"]
