"""Toggled flags: which can act here, and which implementations an engine's flag stands for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.catalogue import flags, recipes
from harness.errors import NothingRan, UsageError
from harness.plan import select
from harness.plan.arms import Flag
from harness.results.effects import word
from harness.run.request import Request
from kernels.platform import Platform


def recipe_flags(name: str) -> list[Flag]:
    """Each variable as the recipe sets it, or not set."""
    recipe = recipes.find(name)
    if recipe.options:
        _say(
            f"{name} also sets options of {recipe.engine}, which no kernel sees: {', '.join(recipe.options)}"
        )
    return [Flag(variable, (value, None)) for variable, value in recipe.environment.items()]


def require_effect(
    chosen: Sequence[Flag], request: Request, platform: Platform, force: bool, recipe: str | None
) -> list[Flag]:
    """Those that can show something here; of a recipe, those that act on kernels themselves and not on an
    engine's choice. Raises UsageError for a misspelt name, NothingRan where none is left, or where one cannot
    that was asked for by name."""
    op = select.choose_op(request.op or "").name
    launch = "eager" if platform.kind == "cpu" else request.launch or "graph"
    reasons = {flag.name: _obstacle(flag, op, platform, launch, force) for flag in chosen}
    if recipe and not force:
        for name in (flag.name for flag in chosen if _chooses(flag) and not reasons[flag.name]):
            reasons[name] = f"{name} chooses between implementations, which an engine does: toggle it alone"
    obstacles = [reason for reason in reasons.values() if reason]
    able = [flag for flag in chosen if force or not reasons[flag.name]]
    if obstacles and not (force or recipe):
        raise NothingRan(f"{'; '.join(obstacles)} (--force runs it all the same)")
    for reason in obstacles:
        _say(reason if force else f"left out: {reason}")
    if not able:
        raise NothingRan(
            f"no variable of {recipe} can change what {op} runs here (--force sets them all the same)"
        )
    return able


def _chooses(flag: Flag) -> bool:
    known = flags.catalogue().get(flag.name)
    return known is not None and bool(known.chooses)


def _obstacle(flag: Flag, op: str, platform: Platform, launch: str, force: bool) -> str:
    """Why a flag can show nothing here; empty if it can, or nothing is known of it."""
    known = flags.catalogue().get(flag.name)
    if known is None:
        meant = flags.suggestions(flag.name)
        if meant and not force:
            instead = " or ".join(meant)
            raise UsageError(
                f"unknown flag {flag.name!r}; did you mean {instead}? (--force sets it as it is)"
            )
        _say(f"{flag.name} is not in the catalogue (`list flags`): nothing is known of it")
        return ""
    for value in flag.values:
        if not (meaning := known.meaning(value)).ok:
            _say(meaning.reason)
    return known.can_touch(op, platform, launch).reason


def stand_ins(chosen: Sequence[Flag], request: Request) -> list[str]:
    """The implementations that the values of engines' flags stand for; empty where no flag is one's. Raises
    UsageError where others stand beside them."""
    choosing = [flag for flag in chosen if _chooses(flag)]
    if choosing and len(choosing) < len(chosen):
        raise UsageError(f"{choosing[0].name} chooses between implementations: toggle it without other flags")
    rows: dict[str, None] = {}
    for flag in choosing:
        known = flags.find(flag.name)
        for value in flag.values:
            names = known.stands_for(value, request.op or "")
            shown = " or ".join(names) or "nothing that is a row here"
            _say(f"{flag.name}={word(value)} makes {known.library} run {shown} for {request.op}")
            rows |= dict.fromkeys(names)
    if rows:
        _say(f"no engine runs here: comparing {', '.join(rows)} instead of setting it")
    return list(rows)


def _say(line: str) -> None:
    print(f"note: {line}", file=sys.stderr)
