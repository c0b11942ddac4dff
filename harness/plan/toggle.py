"""Toggled flags: the settings that they make, which of them can have an effect here, and which
implementations an engine's flag chooses between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import kernels
from harness.catalogue import flags, recipes
from harness.errors import NothingRan, UsageError
from harness.plan import select, settings
from harness.plan.settings import Setting, ToggledFlag, value_text
from kernels.platform import Platform

MARGIN = 0.02
"""A smaller change counts as `same`: it is not worth changing production for, and few machines resolve
less."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class ToggleRequest:
    """The options of `toggle` that `run` does not have, and the op and launch mode, not yet interpreted."""

    op: str | None
    launch: str | None
    flags: Sequence[str]  # texts such as `NAME=value,value`; none with a recipe
    common: Sequence[str]  # texts such as `NAME=value`, set in all settings
    design: str  # `factorial` or `one-at-a-time`
    recipe: str | None
    leave_one_out: bool
    force: bool  # whether flags are set too that can have no effect here, or that are unknown


@dataclass(frozen=True)
class TogglePlan:
    """Either settings of each implementation, with the values of the flags, or the implementations that the
    flags choose between."""

    settings: Sequence[Setting] = ()
    flags: dict[str, list[str | None]] = field(default_factory=dict)
    implementations: Sequence[str] = ()


def plan_toggle(request: ToggleRequest, platform: Platform, log: Log) -> TogglePlan:
    """The settings or implementations that a request asks for. Raises UsageError for what cannot be
    understood, and NothingRan where no flag can have an effect."""
    if bool(request.flags) == bool(request.recipe):
        raise UsageError("give --flag NAME=value[,value...], once or more, or --recipe NAME")
    if request.leave_one_out and not request.recipe:
        raise UsageError("--leave-one-out leaves variables out of a --recipe NAME; name one")
    if request.op is None:
        raise UsageError(f"--op is missing; ops: {', '.join(kernels.OPS)}")
    named = _recipe_flags(request.recipe, log) if request.recipe else settings.parse_flags(request.flags)
    op = select.choose_op(request.op).name
    toggled = _effective(named, op, platform, request, log)
    if not request.force and (stand_ins := _stand_ins(toggled, op, log)):
        return TogglePlan(implementations=stand_ins)
    values = {flag.name: list(flag.values) for flag in toggled}
    return TogglePlan(_settings(toggled, request), values)


def _settings(toggled: Sequence[ToggledFlag], request: ToggleRequest) -> list[Setting]:
    common = settings.parse_setting(request.common).variables
    if request.recipe:
        recipe = {flag.name: flag.values[0] for flag in toggled}
        if request.leave_one_out:
            return settings.leave_one_out(recipe, common)
        return settings.whole(recipe, common)
    if request.design == "factorial":
        return settings.factorial(toggled, common)
    return settings.one_at_a_time(toggled, common)


def _recipe_flags(name: str, log: Log) -> list[ToggledFlag]:
    """The variables of a recipe, each with the recipe's value and not set."""
    recipe = recipes.find(name)
    if recipe.options:
        log(f"{name} also sets options of {recipe.engine}, which no kernel sees: {', '.join(recipe.options)}")
    return [ToggledFlag(variable, (value, None)) for variable, value in recipe.environment.items()]


def _effective(
    named: Sequence[ToggledFlag], op: str, platform: Platform, request: ToggleRequest, log: Log
) -> list[ToggledFlag]:
    """The flags that can have an effect here; of a recipe, those that act on kernels and not on an engine's
    choice. Raises UsageError for a misspelt name, and NothingRan where none is left or where a flag that
    was named on the command line can have no effect."""
    recipe, force = request.recipe, request.force
    launch = "eager" if platform.kind == "cpu" else request.launch or "graph"
    reasons = {flag.name: _obstacle(flag, op, platform, launch, force, log) for flag in named}
    if recipe and not force:
        for name in (flag.name for flag in named if _chooses(flag) and not reasons[flag.name]):
            reasons[name] = f"{name} chooses between implementations, which an engine does: toggle it alone"
    obstacles = [reason for reason in reasons.values() if reason]
    able = [flag for flag in named if force or not reasons[flag.name]]
    if obstacles and not (force or recipe):
        raise NothingRan(f"{'; '.join(obstacles)} (--force runs it all the same)")
    for reason in obstacles:
        log(reason if force else f"left out: {reason}")
    if not able:
        raise NothingRan(
            f"no variable of {recipe} can change what {op} runs here (--force sets them all the same)"
        )
    return able


def _chooses(flag: ToggledFlag) -> bool:
    entry = flags.catalogue().get(flag.name)
    return entry is not None and bool(entry.chooses)


def _obstacle(flag: ToggledFlag, op: str, platform: Platform, launch: str, force: bool, log: Log) -> str:
    """Why a flag can have no effect here; empty if it can, or if nothing is known of it."""
    entry = flags.catalogue().get(flag.name)
    if entry is None:
        meant = flags.suggestions(flag.name)
        if meant and not force:
            instead = " or ".join(meant)
            raise UsageError(
                f"unknown flag {flag.name!r}; did you mean {instead}? (--force sets it as it is)"
            )
        log(f"{flag.name} is not in the catalogue (`list flags`): nothing is known of it")
        return ""
    for value in flag.values:
        if not (meaning := entry.meaning(value)).ok:
            log(meaning.reason)
    return entry.can_touch(op, platform, launch).reason


def _stand_ins(toggled: Sequence[ToggledFlag], op: str, log: Log) -> list[str]:
    """The implementations that the values of engines' flags choose; empty where no flag makes an engine
    choose. Raises UsageError where other flags are given with them."""
    choosing = [flag for flag in toggled if _chooses(flag)]
    if choosing and len(choosing) < len(toggled):
        raise UsageError(f"{choosing[0].name} chooses between implementations: toggle it without other flags")
    rows: dict[str, None] = {}
    for flag in choosing:
        entry = flags.find(flag.name)
        for value in flag.values:
            names = entry.stands_for(value, op)
            meaning = " or ".join(names) or "nothing that is a row here"
            log(f"{flag.name}={value_text(value)} makes {entry.library} run {meaning} for {op}")
            rows |= dict.fromkeys(names)
    if rows:
        log(f"no engine runs here: comparing {', '.join(rows)} instead of setting it")
    return list(rows)
