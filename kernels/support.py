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
        """The first that is not ok, or else one that is ok."""
        return next((s for s in supports if not s.ok), Support(True))


class Mistaken(Support):
    """What stands for an answer that is no Support."""


def need(condition: object, reason: str) -> Support:
    return Support(True) if condition else Support(False, reason)


def as_support(answer: object, source: str) -> Support:
    """What a function answered that should return a Support or a bool; source: its name, for the reason where
    it returned False or something else."""
    if isinstance(answer, Support):
        return answer
    if isinstance(answer, bool):
        return need(answer, f"{source} returned False")
    return Mistaken(False, f"{source} returned {answer!r}, where kernels.support.need(...) or a bool is due")
