"""Settings: environment variables or a source tree under which cells run, one setting per combination of
flags."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.errors import UsageError

UNSET = "unset"
MOST_SETTINGS = 32


@dataclass(frozen=True)
class ToggledFlag:
    """An environment variable and the values it takes; None: not set."""

    name: str
    values: tuple[str | None, ...]


def parse_flags(texts: Iterable[str]) -> list[ToggledFlag]:
    """`NAME=a,b` each: a comma of a value is written `\\,`, no value as `NAME=`, no variable as `NAME=unset`.
    Raises UsageError."""
    flags: dict[str, ToggledFlag] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if not (equals and re.fullmatch(r"[A-Za-z_]\w*", name)):
            raise UsageError(f"cannot read --flag {text!r}; write NAME=value[,value...], or NAME=unset")
        values = [value.replace("\\,", ",") for value in re.split(r"(?<!\\),", rest)]
        for value in values:
            if any(not c.isprintable() for c in value):
                raise UsageError(
                    f"a value of --flag {name} holds {value!r}: no line breaks or other control signs"
                )
        if len(set(values)) < len(values):
            raise UsageError(f"--flag {name} names a value twice: {rest}")
        if name in flags:
            raise UsageError(f"--flag {name} is given twice; list its values in one: {name}=a,b")
        flags[name] = ToggledFlag(name, tuple(None if value == UNSET else value for value in values))
    return list(flags.values())


def factorial(flags: Sequence[ToggledFlag], common: dict[str, str | None]) -> list[Setting]:
    """The plain setting, then one for each combination; `common` is set in all of them."""
    combinations = itertools.product(*(flag.values for flag in flags))
    names = [flag.name for flag in flags]
    settings = [dict(zip(names, values, strict=True)) for values in combinations]
    return _settings(common, [{}, *settings])


def one_at_a_time(flags: Sequence[ToggledFlag], common: dict[str, str | None]) -> list[Setting]:
    """The plain setting, then one for each value of each flag."""
    return _settings(common, [{}, *({flag.name: value} for flag in flags for value in flag.values)])


def leave_one_out(recipe: dict[str, str | None], common: dict[str, str | None]) -> list[Setting]:
    """The whole recipe, which the others are compared with, it without each of its variables, and the plain
    setting: there none of them is set."""
    bare = dict.fromkeys(recipe)
    return _settings(common, [recipe, *(recipe | {name: None} for name in recipe), bare])


def whole(recipe: dict[str, str | None], common: dict[str, str | None]) -> list[Setting]:
    """The plain setting, where none of its variables is set, and the whole recipe."""
    return _settings(common, [dict.fromkeys(recipe), recipe])


def _settings(common: dict[str, str | None], variables: Iterable[dict[str, str | None]]) -> list[Setting]:
    """The first of them a second time at the end, for the noise. Raises UsageError for too many."""
    settings = list(
        {setting.name: setting for setting in (Setting(common | each) for each in variables)}.values()
    )
    for setting in settings:
        parse_threads(setting.variables.get("OMP_NUM_THREADS"))
    if len(settings) > MOST_SETTINGS:
        raise UsageError(
            f"{len(settings)} settings are more than {MOST_SETTINGS}: fewer values, or --design one-at-a-time"
        )
    return [*settings, Setting(settings[0].variables, is_rerun=True)]


PLAIN = "plain"


@dataclass(frozen=True)
class Setting:
    """What cells run under: a set of environment variables, none in the plain setting, or a source tree.

    variables: None takes one away
    is_rerun:   the first setting a second time, in workers of its own: what differs between the two is noise
    tree:      whose kernels/ it runs; None: this one
    revision:  what the tree is called
    """

    variables: dict[str, str | None] = field(default_factory=dict)
    is_rerun: bool = False
    tree: str | None = None
    revision: str = ""

    @property
    def name(self) -> str:
        words = [self.revision] if self.revision else []
        words += [f"{k} unset" if v is None else f"{k}={v}" for k, v in self.variables.items()]
        return (", ".join(words) or PLAIN) + " (again)" * self.is_rerun


def value_text(value: str | None) -> str:
    """Of a variable: `unset` for None, two quotes for the empty one."""
    return UNSET if value is None else value or "''"


def parse_setting(settings: Iterable[str]) -> Setting:
    variables: dict[str, str | None] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"cannot read --set {text!r}; write NAME=VALUE")
        variables[name] = value
    parse_threads(variables.get("OMP_NUM_THREADS"))
    return Setting(variables)


def parse_threads(text: str | None) -> int | None:
    """OMP_NUM_THREADS as a number; None where it is not set."""
    if not text:
        return None
    if not (text.isdecimal() and int(text)):
        raise UsageError(f"cannot read OMP_NUM_THREADS={text!r}; write a number of threads")
    return int(text)
