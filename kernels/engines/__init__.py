"""Which row of this suite a serving engine runs for DeepSeek-R1, by op, architecture, case and settings.

Each engine has a file of data here, such as `vllm.toml`. The data were read in the sources of the release
that the file names, and are untested on hardware. The entries of an op are in the engine's own order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.conditions import holds
from kernels.op import OPS
from shapes.case import Size
from shapes.toml import read_toml

DATA = Path(__file__).parent

KINDS = {"sm_": "cuda", "gfx": "rocm", "x86": "cpu", "aarch64": "cpu"}
"""The kind of platform, by how the name of an architecture begins."""

SPELLED = {"sglang": "SGLang", "vllm": "vLLM"}
"""The names of engines as their makers write them."""


@dataclass(frozen=True)
class EngineDefault:
    """One choice of an engine."""

    engine: str
    version: str
    """The release that was read."""
    op: str
    archs: tuple[str, ...]
    row: str
    """The implementation of this suite; empty where none does the same or no such case occurs (see `why`)."""
    file: str
    """The file that decides, in the engine's Python package."""
    line: int
    function: str
    why: str
    """What that code says, in a phrase."""
    when: tuple[str, ...] = ()
    """Conditions on the sizes of the case, of which one must hold; empty for all cases. Each has parts joined
    by `and`, such as `m < 32`. A part names a size of the op or `heads/tp`: the model's heads divided by the
    server's ranks. With DP attention a rank has more `heads` than that. For a case that does not give
    `heads/tp` it is taken to be `heads`, as without DP attention."""
    flags: str = ""
    """The flags and variables, as on a command line, with which the engine makes this choice; empty: none."""
    fails: bool = False
    """Whether the server does not start, or ends at the first request."""

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """The values of `flags` by name, without dashes. The value of a flag that takes none is empty."""
        values: dict[str, str] = {}
        flag = ""
        for word in self.flags.split():
            if word.startswith("--"):
                flag = word.lstrip("-")
                values[flag] = ""
            elif "=" in word:
                variable, _, value = word.partition("=")
                values[variable] = value
            else:
                values[flag] = word
        return values

    def holds(self, sizes: Mapping[str, Size]) -> bool:
        """Whether it applies to a case. sizes: all sizes of the op, including defaults."""
        return holds(self.when, sizes)


@functools.cache
def engines() -> tuple[str, ...]:
    """Names of the engines that have a file here."""
    return tuple(sorted(path.stem for path in DATA.glob("*.toml")))


@functools.cache
def facts(engine: str) -> dict[str, Any]:
    """What the file of an engine says. `triton` is the version that the release on PyPI installs."""
    return read_toml(DATA / f"{engine}.toml")


@functools.cache
def defaults(engine: str) -> tuple[EngineDefault, ...]:
    """All entries of an engine, in the file's order."""
    data = facts(engine)
    entries = []
    for entry in data["default"]:
        fields = {**entry, "archs": tuple(entry["archs"]), "when": tuple(entry.get("when", ()))}
        entries.append(EngineDefault(engine=engine, version=data["version"], **fields))
    return tuple(entries)


def archs(engine: str) -> list[str]:
    """The architectures that an engine's entries name, in the file's order."""
    return list(dict.fromkeys(arch for entry in defaults(engine) for arch in entry.archs))


def kind(arch: str) -> str:
    """The kind of an architecture: `cuda`, `rocm` or `cpu`; empty if unknown."""
    return next((kind for prefix, kind in KINDS.items() if arch.startswith(prefix)), "")


def entries(engine: str, op: str, arch: str) -> list[EngineDefault]:
    """The entries of an op on an architecture, in the engine's order."""
    return [entry for entry in defaults(engine) if entry.op == op and arch in entry.archs]


def default(
    engine: str, op: str, arch: str, sizes: Mapping[str, Size], given: Mapping[str, str | None] = {}
) -> EngineDefault | None:
    """What an engine runs for a case. Of the entries that apply and whose flags are all set, it is the one
    with the most flags, and of several the first. None where there is no such entry. sizes: all of the op,
    including defaults; given: what is set, as in `EngineDefault.settings`"""
    with_flags = [entry for entry in entries(engine, op, arch) if entry.settings.items() <= given.items()]
    applying = [entry for entry in with_flags if entry.holds(sizes)]
    return max(applying, key=lambda entry: len(entry.settings), default=None)


def choices(
    op: str, arch: str, sizes: Mapping[str, Size], given: Mapping[str, str | None] = {}
) -> dict[str, EngineDefault]:
    """By engine, what it runs for a case, without engines of which that is unknown. Empty where this suite
    does not know the op or a size, as for a plug-in. sizes: of a case or record; given: as in `default`"""
    try:
        all_sizes = asdict(OPS[op].sizes(sizes))
    except (KeyError, ValueError):
        return {}
    chosen = {engine: default(engine, op, arch, all_sizes, given) for engine in engines()}
    return {engine: choice for engine, choice in chosen.items() if choice}
