"""Recorded runs: `load` gives one row per cell."""

from harness.results.read import load

__all__ = ["load"]
