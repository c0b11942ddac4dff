"""`python -m harness toggle`: flags and their values become the arms of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness import arms, plan
from harness.errors import UsageError
from harness.run_command import Request, run


def toggle(request: Request, flags: Sequence[str], design: str) -> int:
    """Returns the exit code; raises HarnessError."""
    if request.resume:
        return run(request)
    chosen = arms.parse_flags(flags)
    if not chosen:
        raise UsageError("--flag is missing; write --flag NAME=value[,value...]")
    common = plan.parse_arm(request.set).variables
    make = arms.factorial if design == "factorial" else arms.one_at_a_time
    values = {flag.name: list(flag.values) for flag in chosen}
    return run(replace(request, arms=make(chosen, common), flags=values))
