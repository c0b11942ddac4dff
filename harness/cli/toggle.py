"""`python -m harness toggle`: flags and their values become the arms of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import kernels
from harness.cli.run import RunDisplay
from harness.errors import UsageError
from harness.machine.device import choose_device
from harness.plan import arms
from harness.plan.arms import parse_arm
from harness.plan.toggle import recipe_flags, require_effect, stand_ins
from harness.run import execute
from harness.run.request import Request

MARGIN = 0.02
"""A change of less is `same`: nobody changes what runs in production for it, few machines resolve less."""


def toggle(
    request: Request, given: Sequence[str], design: str, recipe: str | None, leave_one_out: bool, force: bool
) -> int:
    """Returns the exit code; raises HarnessError."""
    request = replace(request, margin=MARGIN)
    if request.resume:
        return run(request)
    if bool(given) == bool(recipe):
        raise UsageError("give --flag NAME=value[,value...], once or more, or --recipe NAME")
    if leave_one_out and not recipe:
        raise UsageError("--leave-one-out leaves variables out of a --recipe NAME; name one")
    if request.op is None:
        raise UsageError(f"--op is missing; ops: {', '.join(kernels.OPS)}")
    platform = choose_device(request.device)
    chosen = recipe_flags(recipe) if recipe else arms.parse_flags(given)
    chosen = require_effect(chosen, request, platform, force, recipe)
    if not force and (rows := stand_ins(chosen, request)):
        return run(replace(request, impl=",".join(rows), baseline=rows[0]))
    common = parse_arm(request.set).variables
    values = {flag.name: list(flag.values) for flag in chosen}
    if recipe:
        whole = {flag.name: flag.values[0] for flag in chosen}
        made = arms.leave_one_out(whole, common) if leave_one_out else arms.whole(whole, common)
    else:
        made = (arms.factorial if design == "factorial" else arms.one_at_a_time)(chosen, common)
    return run(replace(request, arms=made, flags=values))


def run(request: Request) -> int:
    return execute.run(request, RunDisplay(request))
