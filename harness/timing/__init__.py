"""Measures entries, which are callables here, in rounds of interleaved samples. Knows nothing of devices."""

from harness.timing.rounds import Policy, Round, Rounds, measure

__all__ = ["Policy", "Round", "Rounds", "measure"]
