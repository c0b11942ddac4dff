"""The catalogue of environment flags. The data, with a source for each entry, is in `catalogue/flags.json`.
There are three sorts: those that change what implementations of this suite run (`touches`), those by which a
serving engine chooses between implementations (`chooses`), and those whose effect no measurement here can
show (`without` says why)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.paths import DATA
from kernels.platform import Platform
from shapes.names import either

READ = {
    "process": "as a process starts", "load": "as a library or a device is initialised",
    "import": "as its Python package is imported", "first use": "at its first use, then kept",
    "call": "at each call", "compile": "at each compile of a kernel",
    "build": "as an extension is built, not where it was built already",
    "server": "by a serving engine, as it starts or builds its model",
    "never": "by nothing that was looked at",
}  # fmt: skip
"""When a flag is read -> the same in words."""

UNSET = "unset"
WORDS = {"true": "1", "false": "0"}  # a value in small letters -> the same as the catalogue writes it


@dataclass(frozen=True)
class Flag:
    name: str
    library: str  # the library that reads it
    platforms: Sequence[str]  # the kinds of platform on which it can matter
    default: str  # the value that holds if the flag is not set; `unset` if no value does the same
    read: str  # when it is read; a key of READ
    effect: str
    source: str  # the file and version in which it was confirmed
    values: Mapping[str, str] = field(default_factory=dict)  # value -> meaning
    takes: str = ""  # in words which values it takes besides `values`; empty if it takes no others
    touches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Op -> patterns of the implementations that it can change."""
    chooses: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    """Value -> op -> the implementations that an engine then runs, its first choice first."""
    archs: Sequence[str] = ()  # the architectures on which it can matter; empty means all
    launch: str = ""  # the only launch mode that shows its effect; empty means both
    without: str = ""  # why no kernel on one device can show its effect; empty where one can
    versions: str = ""  # the versions of the library that read it, where not all do
    unconfirmed: str = ""  # what could not be confirmed

    @property
    def ops(self) -> list[str]:
        """The ops that it can affect."""
        return list(dict.fromkeys([*self.touches, *(op for rows in self.chooses.values() for op in rows)]))

    def canonical(self, value: str | None) -> str:
        """A value as the catalogue writes it: `1` for `True`, the default for None and `unset`."""
        if value is None or value == UNSET:
            return self.default
        word = WORDS.get(value.lower(), value)
        return word if value not in self.values and word in self.values else value

    def why_unknown(self, value: str | None) -> str:
        """Says that the flag is not known to take a value; empty if it is. That is worth a warning only:
        versions of a library differ, and a library may ignore a value that it does not know."""
        known = self.canonical(value)
        if known in self.values or self.takes or known == self.default:
            return ""
        return f"{self.name} takes {either(list(self.values))}; not {value!r}"

    def stands_for(self, value: str | None, op: str) -> tuple[str, ...]:
        """The implementations of this suite that an engine runs for an op under a value."""
        return tuple(self.chooses.get(self.canonical(value), {}).get(op, ()))

    def obstacle(self, op: str, platform: Platform, launch: str) -> str:
        """Why toggling the flag can show no effect on an op on a platform; empty if it can."""
        where = f"this is {platform.kind} {platform.arch}"
        if self.without:
            return f"{self.name} has no effect on a kernel on one device: {self.without}"
        if platform.kind not in self.platforms:
            return f"{self.name} acts on {either(self.platforms)}; {where}"
        if self.archs and platform.arch not in self.archs:
            return f"{self.name} acts on {either(self.archs)}; {where}"
        if op not in self.ops:
            return f"{self.name} acts on {either(self.ops)}, not on {op}"
        choices = {tuple(by_op[op]) for by_op in self.chooses.values() if by_op.get(op)}
        if self.chooses and len(choices) < 2:
            rows = either([row for choice in choices for row in choice] or ["nothing"])
            return f"of what an engine chooses between by {self.name} for {op}, only {rows} is a row here"
        if self.launch and launch != self.launch:
            return f"{self.name} shows in {self.launch} launches alone: --launch {self.launch}"
        return ""


@functools.cache
def catalogue() -> dict[str, Flag]:
    """All flags by name, in the order of the file."""
    return {entry["name"]: Flag(**entry) for entry in json.loads((DATA / "flags.json").read_bytes())["flags"]}
