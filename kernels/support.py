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
    """What a function answered that should return a Support; source: its name, for the reason of a failure
    where it returned something else."""
    if isinstance(answer, Support):
        return answer
    return Mistaken(False, f"{source} returned {answer!r}, where a kernels.support.Support is needed")
