"""Toggled flags: the settings they make, which can act here, which implementations an engine's flag means."""

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
"""A change of less is `same`: nobody changes what runs in production for it, few machines resolve less."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class ToggleRequest:
    """The command line of `toggle`, unread, but what it has in common with `run`.

    flags:   `NAME=value[,value...]` each, or none with a recipe
    common:   `NAME=value` each, set in all settings
    design:   `factorial` or `one-at-a-time`
    force:    sets what cannot show anything here, or nobody knows, too
    """

    op: str | None
    launch: str | None
    flags: Sequence[str]
    common: Sequence[str]
    design: str
    recipe: str | None
    leave_one_out: bool
    force: bool


@dataclass(frozen=True)
class TogglePlan:
    """Either settings of each implementation, with the flags' values, or implementations that stand for
    them."""

    settings: Sequence[Setting] = ()
    flags: dict[str, list[str | None]] = field(default_factory=dict)
    implementations: Sequence[str] = ()


def plan_toggle(request: ToggleRequest, platform: Platform, log: Log) -> TogglePlan:
    """Raises UsageError for what cannot be understood, NothingRan where no flag can show anything."""
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
        return (settings.leave_one_out if request.leave_one_out else settings.whole)(recipe, common)
    return (settings.factorial if request.design == "factorial" else settings.one_at_a_time)(toggled, common)


def _recipe_flags(name: str, log: Log) -> list[ToggledFlag]:
    """Each variable as the recipe sets it, or not set."""
    recipe = recipes.find(name)
    if recipe.options:
        log(f"{name} also sets options of {recipe.engine}, which no kernel sees: {', '.join(recipe.options)}")
    return [ToggledFlag(variable, (value, None)) for variable, value in recipe.environment.items()]


def _effective(
    named: Sequence[ToggledFlag], op: str, platform: Platform, request: ToggleRequest, log: Log
) -> list[ToggledFlag]:
    """Those that can show something here; of a recipe, those that act on kernels themselves and not on an
    engine's choice. Raises UsageError for a misspelt name, NothingRan where none is left, or where one cannot
    that was asked for by name."""
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
    """Why a flag can show nothing here; empty if it can, or nothing is known of it."""
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
    """The implementations that the values of engines' flags stand for; empty where no flag is one's. Raises
    UsageError where others stand beside them."""
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
