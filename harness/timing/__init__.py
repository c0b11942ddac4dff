"""Rounds of interleaved samples of entries, which are callables: it knows nothing of devices."""

from harness.timing.interleaved import measure
from harness.timing.rounds import Policy, Round, Rounds

__all__ = ["Policy", "Round", "Rounds", "measure"]
