"""Recorded runs; `load` returns a table with a row for each cell."""

from harness.results.read import load

__all__ = ["load"]
