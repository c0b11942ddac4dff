"""Whether something can run, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Support:
    """Whether something can run. The reason, if it cannot, tells a user what to change."""

    ok: bool
    reason: str = ""

    @staticmethod
    def all_of(*supports: Support) -> Support:
        """The first that is not ok; one that is ok if all are."""
        return next((support for support in supports if not support.ok), Support(True))


class Mistaken(Support):
    """The answer of a function that returned no Support or raised: an error of the row, not of the case."""


def need(condition: object, reason: str) -> Support:
    """Ok if the condition is true, else not ok for this reason."""
    return Support(True) if condition else Support(False, reason)


def as_support(answer: object, source: str) -> Support:
    """The Support that an answer means, which should be a Support or a bool. source: the function's name"""
    if isinstance(answer, Support):
        return answer
    if isinstance(answer, bool):
        return need(answer, f"{source} returned False")
    return Mistaken(False, f"{source} returned {answer!r}, where kernels.support.need(...) or a bool is due")
