"""Stand-ins of libraries that need hardware, made of the signatures that were recorded of their releases.

A function of a stand-in has the library's real signature: a call that does not fit raises TypeError. It
computes nothing. What it returns, where a row looks at that, stands in a table (tests/support/answers.py);
what it writes are numbers in a row (`numbered`), so that a test sees what a row makes of them.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import binding, platform, vendor
from kernels.interfaces import signatures
from kernels.platform import Platform

SIGNATURES = Path(__file__).parent.parent / "kernels" / "signatures"

Arguments = dict[str, Any]
Answer = Callable[[Arguments], Any]
"""What a function returns for its arguments by name; of a function without a known signature, positions are
named `0`, `1` and so on. Of a method also `self`."""

parsed = functools.cache(signatures.parse)

UNITS = 4
"""Compute units of the device that stands in."""

OUTPUTS = {"o", "out", "output", "o_extend"}
"""Arguments that any function writes."""


def numbered(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Whole numbers below 256, which every format of a library's output holds, in an order of period 251."""
    count = torch.arange(torch.Size(shape).numel())
    return (count % 251).to(dtype).view(shape)


def int32(*shape: int) -> torch.Tensor:
    return numbered(*shape, dtype=torch.int32)


def fp32(*shape: int) -> torch.Tensor:
    return numbered(*shape, dtype=torch.float32)


def write(target: torch.Tensor) -> None:
    """What a stand-in leaves in an output that it is given."""
    target.copy_(fp32(*target.shape))


def writes(*names: str) -> Answer:
    """It fills those of these arguments that it is given."""

    def answer(a: Arguments) -> None:
        for name in names:
            if name in a:
                write(a[name])

    return answer


@dataclass
class Libraries:
    """What stand-ins share.

    places:  what is there, by dotted place: a signature, or nothing where the source tells none
    answers: what functions return, by `library.function`, whatever modules and classes lie between
    values:  what stands at places of what is no function
    heard:   is told of every call as it is made: its place, its arguments, the object whose method it is
    returned: is told what a call returned
    """

    places: Mapping[str, str]
    answers: Mapping[str, Answer] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    heard: Callable[[str, Arguments, object], None] = lambda place, arguments, owner: None
    returned: Callable[[str, Any], None] = lambda place, result: None

    def at(self, place: str, owner: object = None) -> StandIn | None:
        return StandIn(place, self, owner) if place in self.places else None

    def call(self, place: str, given: Arguments, owner: object = None) -> Any:
        self.heard(place, given, owner)
        root, *_, name = place.split(".")
        for output in OUTPUTS & given.keys():
            if isinstance(given[output], torch.Tensor):
                write(given[output])
        if answer := self.answers.get(f"{root}.{name}"):
            result = answer(given if owner is None else {**given, "self": owner})
        else:
            result = self.made(place) if self.is_class(place) else None
        self.returned(place, result)
        return result

    def made(self, place: str) -> Made:
        return Made(place, self)

    def is_class(self, place: str) -> bool:
        return place.rpartition(".")[2][0].isupper() or any(p.startswith(f"{place}.") for p in self.places)


class StandIn:
    """What stands at a place of a library: a function, a class, or a name with members, as an enum has.

    owner: the object whose method it is
    """

    def __init__(self, place: str, libraries: Libraries, owner: object = None) -> None:
        self.place, self.libraries, self.owner = place, libraries, owner
        text = libraries.places.get(place, "")
        if text and text != "(*args, **kwargs)":
            self.__signature__ = parsed(text)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if signature := vars(self).get("__signature__"):
            given = dict(signature.bind(*args, **kwargs).arguments)
        else:
            given = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        return self.libraries.call(self.place, given, self.owner)

    def __getitem__(self, grid: object) -> StandIn:
        """A kernel of Triton, launched on a grid."""
        return self

    def __getattr__(self, name: str) -> Any:
        """A method of a class, or a member of what has no signature."""
        place = f"{self.place}.{name}"
        if name.startswith("_") or (self.libraries.places.get(self.place) and not self.libraries.at(place)):
            raise AttributeError(f"{self.place} has no {name}")
        vars(self)[name] = StandIn(place, self.libraries)
        return vars(self)[name]

    def __repr__(self) -> str:
        return self.place


class Made:
    """An object of a class that stands in."""

    def __init__(self, place: str, libraries: Libraries) -> None:
        self.place, self.libraries = place, libraries

    def __getattr__(self, name: str) -> Any:
        if method := self.libraries.at(f"{self.place}.{name}", self):
            return method
        raise AttributeError(f"{self.place} has no {name}")

    def __repr__(self) -> str:
        return f"a {self.place}"


@functools.cache
def release(library: str) -> dict[str, Any]:
    """`version` and `signatures` of a library's release: `NAME` for the newest one, or `NAME VERSION`."""
    name, _, version = library.partition(" ")
    releases = json.loads((SIGNATURES / f"{name}.json").read_text())["releases"]
    if not version:
        return max(releases, key=lambda r: r["date"])
    (found,) = [r for r in releases if r["version"] == version]
    return found


def modules(libraries: Libraries) -> dict[str, ModuleType]:
    """The modules of all places, with what stands in them."""
    made: dict[str, ModuleType] = {}

    def stands(names: list[str]) -> bool:
        return names[-1][0].isupper() or ".".join(names) in libraries.places

    for place in libraries.places:
        names = place.split(".")
        own = next(n for n in range(1, len(names) + 1) if stands(names[:n]))
        for n in range(1, own):
            name = ".".join(names[:n])
            made.setdefault(name, ModuleType(name))
            if n > 1:
                setattr(made[".".join(names[: n - 1])], names[n - 1], made[name])
        top = ".".join(names[:own])
        stands_in = libraries.values.get(top) or StandIn(top, libraries)
        vars(made[".".join(names[: own - 1])]).setdefault(names[own - 1], stands_in)
    return made


@contextmanager
def lent(
    kind: str,
    arch: str,
    *names: str,
    also: Mapping[str, Mapping[str, str]] | None = None,
    besides: Collection[str] = (),
    **how: Any,
) -> Iterator[tuple[Platform, Libraries]]:
    """A platform whose device is this CPU, with stand-ins of the named libraries (see `release`) in the place
    of what is installed.

    also: signatures that were not recorded, by release and place
    besides: modules that count as installed
    how:  as Libraries has it
    """
    here = Platform(kind, arch, "cpu", f"a stand-in for {arch}", memory=8 << 30)
    found = {name.partition(" ")[0]: release(name) for name in names}
    roots = {name.partition(".")[0] for name in found}
    texts = [r["signatures"] for r in found.values()] + [(also or {}).get(name, {}) for name in names]
    libraries = Libraries({p: text for t in texts for p, text in t.items() if text is not None}, **how)
    versions = {name: r["version"] for name, r in found.items()}
    real = platform.version
    mine = {name: m for name, m in sys.modules.items() if name.partition(".")[0] in roots}

    def version(module: str) -> str | None:
        if module in versions or module.partition(".")[0] in roots:
            return versions.get(module)
        return real(module) or ("1.0" if module in besides else None)

    with pytest.MonkeyPatch.context() as patch:
        for name in mine:
            patch.delitem(sys.modules, name)
        for name, module in modules(libraries).items():
            patch.setitem(sys.modules, name, module)
        for module in (platform, binding, vendor):
            patch.setattr(module, "version", version)
        patch.setattr(platform, "lookalike", lambda module: "")
        patch.setattr(platform, "devices", lambda: {"cpu": here})
        properties = SimpleNamespace(multi_processor_count=UNITS)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        scaled_mm = StandIn("torch.nn.functional.scaled_mm", libraries)
        vars(scaled_mm)["__signature__"] = inspect.signature(torch.nn.functional.scaled_mm)
        patch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
        patch.setattr(tempfile, "mkdtemp", lambda: "/new/folder")
        yield here, libraries
