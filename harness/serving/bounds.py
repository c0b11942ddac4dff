"""What can be said of a change without any trace: Amdahl's law, both ways.

before, after: times of a step (or of anything that a kernel is a share of), in one unit.
"""

from __future__ import annotations


def least_share(before: float, after: float, factor: float) -> float:
    """The share of `before` that a kernel must have had, at least, if it alone changed, by `factor` (time
    before / time after). Over 1: it cannot have been this kernel alone.

        after >= before * (1 - share) + before * share / factor
    """
    if before <= 0 or after <= 0 or factor <= 0 or factor == 1:
        raise ValueError("times and factor must be positive, and the factor not 1")
    return (1 - after / before) / (1 - 1 / factor)


def most_factor(share: float) -> float:
    """before / after at best, however fast a kernel of this share becomes; infinite for a share of 1."""
    if not 0 <= share <= 1:
        raise ValueError(f"a share lies between 0 and 1, not at {share:g}")
    return float("inf") if share == 1 else 1 / (1 - share)


def saved_per_call_us(before_ms: float, after_ms: float, calls: int) -> float:
    """Microseconds that each of a step's calls saved, if they alone changed and nothing hid them."""
    return (before_ms - after_ms) / calls * 1e3
