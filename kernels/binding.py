"""Binding to libraries whose interfaces change from version to version: what is installed decides.

A row states as data what it takes of its library, as symbols: so that it can be checked against a version's
source without a device. Whatever is not there is one line that names the library's version.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kernels.interfaces import signatures
from kernels.interfaces.library_source import LibrarySource, NotThere, SignatureSource
from kernels.op import Unsupported
from kernels.platform import version

VendorFunction = Callable[..., Any]  # a library's own, whose types are not known here


class BindingError(Exception):
    """The installed library does not take what a row gives it: its interface has changed. An error of the
    row, not a lack of the machine."""


@dataclass(frozen=True, init=False)
class Symbol:
    """A name in a library: a class, a constant, a function whose arguments are no matter.

    places: dotted, the first that exists is taken, as libraries move their names
    when:   the cases or devices that need it (`kv=fp8`, `sm_100`); empty: all
    """

    places: tuple[str, ...]
    when: str

    def __init__(self, *places: str, when: str = "") -> None:
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "when", when)

    @property
    def package(self) -> str:
        return self.places[0].partition(".")[0]

    @property
    def release(self) -> str:
        """The library and its installed version, for messages."""
        return _named(self.package)

    def find(self) -> Any:  # whatever a library has there
        """Raises Unsupported where the library, or the part of it, cannot be imported, and BindingError where
        it has no such name."""
        return self.at()[1]

    def exists(self) -> bool:
        """Whether the installed version has it."""
        try:
            self.at()
        except (BindingError, Unsupported):
            return False
        return True

    def at(self) -> tuple[str, Any]:
        """The place that exists, and what is there."""
        absent: Unsupported | None = None
        for place in self.places:
            names = place.split(".")
            try:
                module, own = _innermost(names[:-1])
            except Unsupported as error:
                absent = absent or error
                continue
            with contextlib.suppress(AttributeError):
                return place, functools.reduce(getattr, names[own:], module)
        if absent:
            raise absent
        lacking = " or ".join(place.partition(".")[2] for place in self.places)
        raise BindingError(f"{_named(self.package)} has no {lacking}")

    def signature_in(self, source: SignatureSource) -> tuple[str, inspect.Signature | None]:
        """The place that exists in a library's source, and what stands there. Raises NotThere."""
        missing = NotThere("no place")
        for place in self.places:
            try:
                return place, source.signature(place)
            except NotThere as error:
                missing = error
        raise missing

    def complaint(self, signature: inspect.Signature | None) -> str:
        """Why what stands there cannot be called as a row calls it; empty if it can."""
        return ""

    def is_told(self, signature: inspect.Signature | None) -> bool:
        """Whether that is enough to tell."""
        return True

    def lacks(self, signature: inspect.Signature | None) -> set[str]:
        """Wished arguments that it does not take."""
        return set()


@dataclass(frozen=True, init=False)
class Function(Symbol):
    """A function, class or method of a library as a row calls it.

    needs:     arguments that every call gives by name
    wishes:    that are given where the version is known to take them
    positions: how many are given by position before them (of a method, without its object)
    """

    needs: tuple[str, ...]
    wishes: tuple[str, ...]
    positions: int

    def __init__(
        self, *places: str, needs: str = "", wishes: str = "", positions: int = 0, when: str = ""
    ) -> None:
        super().__init__(*places, when=when)
        object.__setattr__(self, "needs", tuple(needs.split()))
        object.__setattr__(self, "wishes", tuple(wishes.split()))
        object.__setattr__(self, "positions", positions)

    def needing(self, more: str, when: str) -> Function:
        """The same where some cases need more, which may be wishes of others."""
        needs = [*self.needs, *more.split()]
        wishes = [name for name in self.wishes if name not in needs]
        return Function(
            *self.places, needs=" ".join(needs), wishes=" ".join(wishes), positions=self.positions, when=when
        )

    def bind(self, *by_position: object, of: object = None, **given: object) -> Callable[[], Any]:
        """The call: the function with these arguments, of which it gets those wishes that it knows.

        of: the object whose method it is; by default the function that the places name

        Raises Unsupported and BindingError.
        """
        undeclared = [name for name in given if name not in self.needs and name not in self.wishes]
        missing = [name for name in self.needs if name not in given]
        assert not undeclared and not missing and len(by_position) == self.positions, (
            f"{self.places[0]} is declared otherwise: {undeclared or missing or len(by_position)}"
        )
        place, function = self.at()
        if of is not None:
            function = getattr(of, place.rpartition(".")[2])
        signature = _signature(place, function)
        if complaint := self.complaint(signature):
            raise BindingError(f"{_named(self.package)}: {complaint}")
        known = {
            name: value for name, value in given.items() if name in self.needs or self.knows(name, signature)
        }
        return functools.partial(function, *by_position, **known)

    def is_told(self, signature: inspect.Signature | None) -> bool:
        return signature is not None

    def lacks(self, signature: inspect.Signature | None) -> set[str]:
        return {name for name in self.wishes if signature and not self.knows(name, signature)}

    def takes(self, wish: str) -> bool:
        """Whether the installed version knows that argument."""
        place, function = self.at()
        return self.knows(wish, _signature(place, function))

    def knows(self, name: str, signature: inspect.Signature | None) -> bool:
        if signature is None:  # it tells nothing: what is wished for may be an argument that it lacks
            return False
        kinds = {p.name: p.kind for p in signature.parameters.values()}
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return kinds.get(name) in by_name or inspect.Parameter.VAR_KEYWORD in kinds.values()

    def complaint(self, signature: inspect.Signature | None) -> str:
        if signature is None:
            return ""
        wishes = [name for name in self.wishes if self.knows(name, signature)]
        try:
            signature.bind(*range(self.positions), **dict.fromkeys([*self.needs, *wishes]))
        except TypeError as error:
            return f"{self.places[0].rpartition('.')[2]} {str(error).removeprefix('got ')}"
        return ""


@dataclass(frozen=True, init=False)
class Operator(Function):
    """An operator of torch that a compiled part of a library registers, as a row calls it by position:
    `library._C.name` is `torch.ops._C.name`.

    loader: the module that registers it as it is imported
    """

    loader: str

    def __init__(self, place: str, positions: int, loader: str) -> None:
        super().__init__(place, positions=positions)
        object.__setattr__(self, "loader", loader)

    def at(self) -> tuple[str, Any]:
        import torch

        load(self.loader)
        *_, namespace, name = self.places[0].split(".")
        try:
            return self.places[0], getattr(getattr(torch.ops, namespace), name)
        except AttributeError:
            raise BindingError(f"{_named(self.package)} has no operator {name}") from None

    def signature_in(self, source: SignatureSource) -> tuple[str, inspect.Signature | None]:
        """Schemas stand in compiled files: a source without them does not tell."""
        try:
            return super().signature_in(source)
        except NotThere:
            return self.places[0], None


Taken = Symbol | tuple[Symbol, ...]
"""What a row takes of its library: a symbol, or the first of several that exists."""


def first_of(*alternatives: Symbol) -> Any:
    """The first that exists. Raises as `find` does, of the first."""
    for symbol in alternatives:
        if symbol.exists():
            return symbol
    alternatives[0].at()
    raise AssertionError


def _innermost(names: list[str]) -> tuple[ModuleType, int]:
    """The innermost module of a dotted name that is there, and how many of the names are its own; the rest
    are classes. Raises Unsupported for a module that cannot be imported."""
    for own in range(len(names), 1, -1):
        name = ".".join(names[:own])
        try:
            return importlib.import_module(name), own
        except ModuleNotFoundError as missing:
            if missing.name and (name == missing.name or name.startswith(f"{missing.name}.")):
                continue
            load(name)
        except Exception:
            load(name)
    return load(names[0]), 1


def _signature(place: str, function: VendorFunction) -> inspect.Signature | None:
    """Of an installed function: what it tells, or else its source: some libraries wrap theirs so that they
    take anything to look at."""
    # An engine under test binds at every step: what a function tells is read once.
    return (_read_once if isinstance(function, Hashable) else _read_once.__wrapped__)(place, function)


@functools.lru_cache(maxsize=256)
def _read_once(place: str, function: VendorFunction) -> inspect.Signature | None:
    if signature := signatures.of(function):
        return signature
    if inspect.isbuiltin(function):  # of C++: no Python source tells
        return None
    try:
        return LibrarySource.installed(place.partition(".")[0]).signature(place)
    except (NotThere, OSError, ValueError):
        return None


def load(module: str) -> ModuleType:
    """The imported module. Raises Unsupported where it cannot be imported: a GPU library asks for its device,
    its driver or a compiler as it is imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Unsupported(f"{_named(module)} cannot be imported: {_with_causes(error)}") from error


def _with_causes(error: BaseException | None) -> str:
    """An error and what caused it, in one line: torch says `Could not load this library`, and only the cause
    names the undefined symbol."""
    reasons = []
    while error is not None:
        reasons.append(" ".join(str(error).split()) or type(error).__name__)
        error = error.__cause__
    return "; caused by: ".join(dict.fromkeys(reasons))


def _named(module: str) -> str:
    root = module.partition(".")[0]
    return f"{root} {version(root) or ''}".strip()
