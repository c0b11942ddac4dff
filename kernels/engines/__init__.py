"""What serving engines run for DeepSeek-R1: a row of this suite by op, architecture, case and what is set.

Each engine has a file of data here, such as `vllm.toml`. It was read in the sources of the release that it
names, and is untested on hardware. The entries of an op stand in the engine's own order: the first that
applies holds.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes.case import Size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DATA = Path(__file__).parent

KINDS = {"sm_": "cuda", "gfx": "rocm", "x86": "cpu"}
"""How the name of an architecture begins -> its kind of platform."""

RELATIONS: Mapping[str, Callable[[Size, Size], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "multiple-of": lambda given, of: int(given) % int(of) == 0,
    "not-multiple-of": lambda given, of: int(given) % int(of) != 0,
}


@dataclass(frozen=True)
class SizeCondition:
    """A size of the case against a number or a word: `m < 32`, `kv = fp8`, `page multiple-of 64`.

    `heads/tp` is the number of the model's heads over the number of the server's ranks. With DP attention a
    rank has more `heads` than that; a case that does not give it is taken to be without.
    """

    size: str
    relation: str
    value: Size

    def holds(self, sizes: Mapping[str, Size]) -> bool:
        """Raises ValueError where one of the two is a word and they cannot be ordered."""
        given = _number(sizes.get(self.size, sizes[self.size.partition("/")[0]]))
        if self.relation not in ("=", "!=") and isinstance(given, str) is not isinstance(self.value, str):
            raise ValueError(f"size {self.size}={given} cannot be ordered against {self.value}")
        return RELATIONS[self.relation](given, self.value)


@dataclass(frozen=True)
class EngineDefault:
    """One choice of an engine.

    engine, version: vllm or sglang, and the release that was read
    op, archs:       what for, and where
    when:            conditions on the case's sizes, any of which suffices; empty: all cases
    row:             the implementation of this suite; empty: it has none that does the same, or the engine
                     never has such a case; `why` says which
    file, line, function: that decide it, within the engine's Python package
    why:             what that code says, in a phrase
    flags:           what must be set for it; empty: nothing
    """

    engine: str
    version: str
    op: str
    archs: tuple[str, ...]
    row: str
    file: str
    line: int
    function: str
    why: str
    when: tuple[str, ...] = ()
    flags: str = ""

    @functools.cached_property
    def terms(self) -> tuple[tuple[SizeCondition, ...], ...]:
        """The terms of each condition. Raises ValueError for one that cannot be read."""
        return tuple(tuple(_term(text) for text in one.split(" and ")) for one in self.when)

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """`flags` by name, which is without the dashes; the value of a flag that takes none is empty."""
        found: dict[str, str] = {}
        name = ""
        for word in self.flags.split():
            if word.startswith("--"):
                name = word.lstrip("-")
                found[name] = ""
            elif "=" in word:
                variable, _, found[variable] = word.partition("=")
            else:
                found[name] = word
        return found

    def holds(self, sizes: Mapping[str, Size]) -> bool:
        """sizes: all sizes of the op, also those that the case leaves at their default"""
        return not self.when or any(all(term.holds(sizes) for term in terms) for terms in self.terms)


@functools.cache
def engines() -> tuple[str, ...]:
    """Names of the engines whose defaults are known."""
    return tuple(sorted(path.stem for path in DATA.glob("*.toml")))


@functools.cache
def _read(engine: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{engine}.toml").read_text())


@functools.cache
def defaults(engine: str) -> tuple[EngineDefault, ...]:
    """All entries of one of `engines()`, in the file's order."""
    read = _read(engine)
    return tuple(
        EngineDefault(
            **entry
            | {"engine": engine, "version": read["version"]}
            | {name: tuple(entry.get(name, ())) for name in ("archs", "when")}
        )
        for entry in read["default"]
    )


def triton(engine: str) -> str:
    """The version of Triton that comes with an engine's release on PyPI, by the torch that it pins."""
    return str(_read(engine)["triton"])


def archs(engine: str) -> list[str]:
    """The architectures that an engine's entries name."""
    return list(dict.fromkeys(arch for entry in defaults(engine) for arch in entry.archs))


def kind(arch: str) -> str:
    """`cuda`, `rocm` or `cpu`; empty where that is not known."""
    return next((kind for start, kind in KINDS.items() if arch.startswith(start)), "")


def entries(engine: str, op: str, arch: str) -> list[EngineDefault]:
    """The entries of an op on an architecture, in the engine's order."""
    return [entry for entry in defaults(engine) if entry.op == op and arch in entry.archs]


def default(
    engine: str, op: str, arch: str, sizes: Mapping[str, Size], given: Mapping[str, str] = {}
) -> EngineDefault | None:
    """What an engine runs for a case: of the entries that hold for its sizes and whose flags are all set, the
    first of those with the most flags. None where there is no such entry.

    given: the variables and flags that are set, as in `EngineDefault.settings`
    """
    holding = [
        entry
        for entry in entries(engine, op, arch)
        if entry.settings.items() <= given.items() and entry.holds(sizes)
    ]
    return max(holding, key=lambda entry: len(entry.settings), default=None)


def _term(text: str) -> SizeCondition:
    words = text.split()
    if len(words) != 3 or words[1] not in RELATIONS:
        raise ValueError(f"cannot read the condition {text!r}; write for example 'm < 32' or 'kv = fp8'")
    return SizeCondition(words[0], words[1], _number(words[2]))


def _number(value: Size) -> Size:
    """A whole number as such, whatever else as a word."""
    return int(value) if str(value).isdecimal() else str(value)
