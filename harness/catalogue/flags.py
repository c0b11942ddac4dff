"""Environment flags, a catalogue: what each acts on, when it is read, what its values mean.

The data, with a source for each entry, is `catalogue/flags.json`. A flag acts in one of three ways:
it changes what rows of this suite run (`touches`), a serving engine chooses between implementations by it
(`chooses`), or nothing here can show it (`without` says why).
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import DATA
from kernels.op import Support
from kernels.platform import Platform
from kernels.vendor import either

READ = {
    "process": "as a process starts",
    "load": "as a library or a device is initialised",
    "import": "as its Python package is imported",
    "first use": "at its first use, then kept",
    "call": "at each call",
    "compile": "at each compile of a kernel",
    "build": "as an extension is built, not where it was built already",
    "server": "by a serving engine, as it starts or builds its model",
    "never": "by nothing that was looked at",
}
"""When a flag is read."""

UNSET = "unset"
WORDS = {"true": "1", "false": "0"}


@dataclass(frozen=True)
class Flag:
    """One environment variable.

    library:     that reads it
    platforms:   kinds of platform that it can matter on; archs: of those, empty for all
    default:     what holds where it is not set; `unset` where that is a state of its own
    read:        one of READ
    effect:      what it does, in words
    values:      value -> meaning; takes: what else it takes, empty where `values` are all
    touches:     op -> patterns of the implementations that it can change
    chooses:     value -> op -> the implementations that it stands for in an engine, its first choice first
    launch:      the launch mode that alone shows it, empty for both
    without:     why no kernel on one device can show it, empty where one can
    versions:    in which it is read, where that is known and not all
    source:      file and version that it was confirmed in
    unconfirmed: what of this was not
    """

    name: str
    library: str
    platforms: tuple[str, ...]
    default: str
    read: str
    effect: str
    source: str
    values: Mapping[str, str] = field(default_factory=dict)
    takes: str = ""
    touches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chooses: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    archs: tuple[str, ...] = ()
    launch: str = ""
    without: str = ""
    versions: str = ""
    unconfirmed: str = ""

    @property
    def ops(self) -> list[str]:
        """Those that it can matter to."""
        return list(dict.fromkeys([*self.touches, *(op for rows in self.chooses.values() for op in rows)]))

    def canonical(self, value: str | None) -> str:
        """A value as the catalogue writes it: `True` is `1` where that is known; None and `unset` are the
        default."""
        if value is None or value == UNSET:
            return self.default
        word = WORDS.get(value.lower(), value)
        return word if value not in self.values and word in self.values else value

    def meaning(self, value: str | None) -> Support:
        """What a value does, or why it is not one that the flag is known to take. That is worth a warning and
        no more: versions differ, and a library may pass over in silence what it does not know."""
        known = self.canonical(value)
        if known in self.values:
            return Support(True, self.values[known])
        if self.takes or known == self.default:
            return Support(True, self.takes)
        return Support(False, f"{self.name} takes {either(list(self.values))}; not {value!r}")

    def stands_for(self, value: str | None, op: str) -> tuple[str, ...]:
        """The implementations that an engine runs for an op under a value, as far as they are rows here."""
        return tuple(self.chooses.get(self.canonical(value), {}).get(op, ()))

    def can_touch(self, op: str, platform: Platform, launch: str) -> Support:
        """Whether toggling it can show anything for an op there, and if not why."""
        reason = next(self._obstacles(op, platform, launch), "")
        return Support(not reason, reason)

    def _obstacles(self, op: str, platform: Platform, launch: str) -> Iterator[str]:
        where = f"this is {platform.kind} {platform.arch}"
        if self.without:
            yield f"{self.name} has no effect on a kernel on one device: {self.without}"
        if platform.kind not in self.platforms:
            yield f"{self.name} acts on {either(self.platforms)}; {where}"
        if self.archs and platform.arch not in self.archs:
            yield f"{self.name} acts on {either(self.archs)}; {where}"
        if op not in self.ops:
            yield f"{self.name} acts on {either(self.ops)}, not on {op}"
        rows = {tuple(by_op[op]) for by_op in self.chooses.values() if by_op.get(op)}
        if self.chooses and len(rows) < 2:
            present = either([name for names in rows for name in names] or ["nothing"])
            yield f"of what an engine chooses between by {self.name} for {op}, only {present} is a row here"
        if self.launch and launch != self.launch:
            yield f"{self.name} shows in {self.launch} launches alone: --launch {self.launch}"


@functools.cache
def catalogue() -> dict[str, Flag]:
    """All flags by name, in the order of the file."""
    return {entry["name"]: _flag(entry) for entry in json.loads((DATA / "flags.json").read_text())["flags"]}


def _flag(entry: JsonObject) -> Flag:
    lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
    return Flag(**{**entry, **lists})


def suggestions(name: str) -> list[str]:
    """Flags that a misspelt name may have meant, nearest first."""
    return difflib.get_close_matches(name.upper(), list(catalogue()), n=3, cutoff=0.75)


def find(name: str) -> Flag:
    """Raises UsageError for a name that the catalogue lacks."""
    if name in catalogue():
        return catalogue()[name]
    meant = suggestions(name)
    hint = f"did you mean {either(meant)}?" if meant else "`list flags` shows all"
    raise UsageError(f"unknown flag {name!r}; {hint}")
