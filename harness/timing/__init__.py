"""Rounds of interleaved samples of entries, which are callables: it knows nothing of devices."""

from harness.timing.rounds import Policy, Round, Rounds, measure

__all__ = ["Policy", "Round", "Rounds", "measure"]
