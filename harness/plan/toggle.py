"""Plans what `toggle` compares: settings of flags, or the implementations that an engine's flag chooses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import kernels
from harness.catalogue import flags, recipes
from harness.errors import NothingRan, UsageError
from harness.plan import select
from harness.plan.settings import UNSET, Setting, parse_setting, parse_threads, value_text
from kernels.platform import Platform
from shapes.names import near

MARGIN = 0.02  # a smaller change counts as `same`: production stays for it, and few machines resolve less

MOST_SETTINGS = 32  # the most settings that one run compares

Log = Callable[[str], None]

Variables = dict[str, str | None]  # environment variables; None: not set
Flags = dict[str, list[str | None]]  # environment variables with the values that each takes; None: not set


@dataclass(frozen=True)
class TogglePlan:
    """What is compared: settings, with the values of flags, or implementations that flags choose between."""

    settings: Sequence[Setting] = ()
    flags: Flags = field(default_factory=dict)
    implementations: Sequence[str] = ()


def plan_toggle(
    platform: Platform,
    log: Log,
    *,
    op: str | None,
    launch: str | None,
    flag_texts: Sequence[str],
    common: Sequence[str],
    design: str,
    recipe: str | None,
    leave_one_out: bool,
    force: bool,
) -> TogglePlan:
    """The settings or implementations that the options of `toggle` ask for. Raises UsageError for what
    cannot be understood, and NothingRan where no flag can have an effect.

    flag_texts:    texts such as `NAME=value,value`; none with a recipe
    common:        texts such as `NAME=value`, set in all settings
    design:        `factorial` or `one-at-a-time`
    recipe:        the name of a recipe, whose variables are toggled together
    leave_one_out: whether each variable of the recipe is also left out alone
    force:         whether flags are set too that can have no effect here, or that are unknown
    """
    if bool(flag_texts) == bool(recipe):
        raise UsageError("give --flag NAME=value[,value...], once or more, or --recipe NAME")
    if leave_one_out and not recipe:
        raise UsageError("--leave-one-out leaves variables out of a --recipe NAME; name one")
    if op is None:
        raise UsageError(f"--op is missing; ops: {', '.join(kernels.OPS)}")
    if recipe:
        named: Flags = {name: [value, None] for name, value in recipes.find(recipe).environment.items()}
    else:
        named = parse_flags(flag_texts)
    op = select.choose_op(op).name
    launch = "eager" if platform.kind == "cpu" else launch or "graph"
    toggled = _effective(named, op, platform, launch, recipe, force, log)
    chosen_rows = [] if force else _chosen_rows(toggled, op, log)
    if chosen_rows:
        return TogglePlan(implementations=chosen_rows)
    combinations: list[Variables] = [{}]  # The other settings are compared with the first one.
    if recipe:
        none_set: Variables = dict.fromkeys(toggled)
        all_set = {name: values[0] for name, values in toggled.items()}
        combinations = [none_set, all_set]
        if leave_one_out:
            without_one = [all_set | {name: None} for name in all_set]
            combinations = [all_set, *without_one, none_set]
    elif design == "factorial":
        chosen_values = itertools.product(*toggled.values())
        combinations += [dict(zip(toggled, values, strict=True)) for values in chosen_values]
    else:
        combinations += [{name: value} for name, values in toggled.items() for value in values]
    return TogglePlan(settings_of(combinations, parse_setting(common).variables), toggled)


def parse_flags(texts: Iterable[str]) -> Flags:
    """The flags of texts such as `NAME=a,b`. A comma inside a value is written `\\,`, an empty value
    `NAME=`, and a variable that is not set `NAME=unset`. Raises UsageError."""
    parsed: Flags = {}
    for text in texts:
        name, equals, list_of_values = text.partition("=")
        if not (equals and re.fullmatch(r"[A-Za-z_]\w*", name)):
            raise UsageError(f"cannot read --flag {text!r}; write NAME=value[,value...], or NAME=unset")
        # Split at the commas that have no backslash before them.
        values = [value.replace("\\,", ",") for value in re.split(r"(?<!\\),", list_of_values)]
        if len(set(values)) < len(values):
            raise UsageError(f"--flag {name} names a value twice: {list_of_values}")
        if name in parsed:
            raise UsageError(f"--flag {name} is given twice; list its values in one: {name}=a,b")
        parsed[name] = [None if value == UNSET else value for value in values]
    return parsed


def settings_of(combinations: Iterable[Variables], common: Variables) -> list[Setting]:
    """The settings of these combinations of variables, each with the common variables, without duplicates.
    Raises UsageError for more than MOST_SETTINGS."""
    settings: dict[str, Setting] = {}
    for combination in combinations:
        setting = Setting(common | combination)
        parse_threads(setting.variables.get("OMP_NUM_THREADS"))
        settings[setting.name] = setting
    if len(settings) > MOST_SETTINGS:
        raise UsageError(
            f"{len(settings)} settings are more than {MOST_SETTINGS}: fewer values, or --design one-at-a-time"
        )
    return list(settings.values())


def _effective(
    named: Flags, op: str, platform: Platform, launch: str, recipe: str | None, force: bool, log: Log
) -> Flags:
    """The flags to toggle. Of a recipe they are those that can have an effect here and make no engine choose
    between implementations. Of the command line, and with `force`, they are all; without `force` each must be
    able to have an effect. Raises NothingRan, and UsageError for a misspelt name."""
    obstacles = {
        name: _obstacle(name, values, op, platform, launch, force, log) for name, values in named.items()
    }
    reasons = [reason for reason in obstacles.values() if reason]
    if force:
        for reason in reasons:
            log(reason)
    elif reasons and not recipe:
        raise NothingRan(f"{'; '.join(reasons)} (--force runs it all the same)")
    if force or not recipe:
        return named
    effective = {name: values for name, values in named.items() if not obstacles[name] and not _chooses(name)}
    if not effective:
        raise NothingRan(
            f"no variable of {recipe} can change what {op} runs here (--force sets them all the same)"
        )
    idle = f"{len(named) - len(effective)} of {len(named)} variables cannot act here"
    log(f"{recipe}: {idle}, and options of servers are not applied (`list recipes` says why)")
    return effective


def _obstacle(
    name: str, values: Iterable[str | None], op: str, platform: Platform, launch: str, force: bool, log: Log
) -> str:
    """Why a flag has no effect here; empty where it may have one. Raises UsageError for a misspelt one."""
    flag = flags.catalogue().get(name)
    if flag is None:
        meant = " or ".join(near(name, flags.catalogue(), 0.75))
        if meant and not force:
            raise UsageError(f"unknown flag {name!r}; did you mean {meant}? (--force sets it as it is)")
        log(f"{name} is not in the catalogue (`list flags`): nothing is known of it")
        return ""
    for why in filter(None, map(flag.why_unknown, values)):
        log(why)
    return flag.obstacle(op, platform, launch)


def _chooses(name: str) -> bool:
    """Whether a flag makes an engine choose between implementations."""
    flag = flags.catalogue().get(name)
    return flag is not None and bool(flag.chooses)


def _chosen_rows(toggled: Flags, op: str, log: Log) -> list[str]:
    """The implementations between which the values of engines' flags choose; empty where no flag makes an
    engine choose. Raises UsageError where other flags are given with such a flag."""
    choosing = [name for name in toggled if _chooses(name)]
    if choosing and len(choosing) < len(toggled):
        raise UsageError(f"{choosing[0]} chooses between implementations: toggle it without other flags")
    rows: list[str] = []
    for name in choosing:
        flag = flags.catalogue()[name]
        for value in toggled[name]:
            chosen = flag.stands_for(value, op)
            meaning = " or ".join(chosen) or "nothing that is a row here"
            log(f"{name}={value_text(value)} makes {flag.library} run {meaning} for {op}")
            rows += [row for row in chosen if row not in rows]
    if rows:
        log(f"no engine runs here: comparing {', '.join(rows)} instead of setting it")
    return rows
