"""Binds rows to the installed versions of libraries, whose interfaces change.

A row declares the names and arguments that it uses as symbols, so that these can be checked against the
source of any version, without a device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

from kernels.interfaces import signatures
from kernels.interfaces.library_source import LibrarySource, NotThere, SignatureSource
from kernels.op import Unsupported
from kernels.platform import version

VendorFunction = Callable[..., Any]


class BindingError(Exception):
    """The installed library has another interface than the row expects. The text is one line that names the
    version. It is an error of the row; nothing is missing on the machine."""


class Symbol:
    """A name in a library: a class, a constant, or a function whose arguments need no check."""

    def __init__(self, *places: str, when: str = "") -> None:
        """places: dotted names. Libraries move what they have, so the first of these that exists is used
        when:   the cases or devices that need it, such as `kv=fp8` or `sm_100`; empty for all"""
        self.places, self.when = places, when

    @property
    def release(self) -> str:
        """The library and its installed version, for messages."""
        return _release_of(self.places[0])

    def find(self) -> Any:
        """The object. Raises Unsupported without the module, and BindingError without the name."""
        _, found = self.at()
        return found

    def exists(self) -> bool:
        try:
            self.at()
        except (BindingError, Unsupported):
            return False
        return True

    def at(self) -> tuple[str, Any]:
        """The place that exists, and the object there. Raises as `find` does."""
        errors: list[Unsupported] = []
        for place in self.places:
            names = place.split(".")
            try:
                module, depth = _innermost(names[:-1])
            except Unsupported as error:
                errors.append(error)
                continue
            with contextlib.suppress(AttributeError):
                found: Any = module
                for name in names[depth:]:
                    found = getattr(found, name)
                return place, found
        if errors:
            raise errors[0]
        missing = " or ".join(place.partition(".")[2] for place in self.places)
        raise BindingError(f"{self.release} has no {missing}")

    def signature_in(self, source: SignatureSource) -> inspect.Signature | None:
        """The signature at the first place that a source has; None if it does not tell. Raises NotThere."""
        error = NotThere("no place")
        for place in self.places:
            try:
                return source.signature(place)
            except NotThere as not_there:
                error = not_there
        raise error

    def complaint(self, signature: inspect.Signature | None) -> str:
        """Why the row's call does not fit a signature; empty where it does, or the signature is None."""
        return ""

    def lacks(self, signature: inspect.Signature | None) -> set[str]:
        """Those of `Function.wishes` that this signature does not take; none where it is not known (None)."""
        return set()


class Function(Symbol):
    """A function, class or method of a library, and how a row calls it."""

    def __init__(
        self, *places: str, needs: str = "", wishes: str = "", positions: int = 0, when: str = ""
    ) -> None:
        """needs:     names of the arguments that every call passes by name, separated by spaces
        wishes:    names of the arguments that are passed by name where the installed version takes them
        positions: how many arguments are passed by position. The object of a method does not count"""
        super().__init__(*places, when=when)
        self.needs = tuple(needs.split())
        self.wishes = tuple(wishes.split())
        self.positions = positions

    def needing(self, more: str, when: str) -> Function:
        """The same function for those cases that need more arguments, which may be wishes of the other cases.
        more, when: as `needs` and `when`"""
        needs = [*self.needs, *more.split()]
        wishes = [name for name in self.wishes if name not in needs]
        return Function(
            *self.places, needs=" ".join(needs), wishes=" ".join(wishes), positions=self.positions, when=when
        )

    def bind(self, *by_position: object, method_of: object = None, **by_name: object) -> Callable[[], Any]:
        """Returns a call of the function with these arguments, without the wishes that it does not take.
        Raises Unsupported, BindingError, and AssertionError for arguments that were not declared.
        method_of: the object of which it is a method"""
        declaration = f"the declaration of {self.places[0]}"
        undeclared = by_name.keys() - {*self.needs, *self.wishes}
        assert not undeclared, f"{declaration} does not name {sorted(undeclared)}"
        missing = [argument for argument in self.needs if argument not in by_name]
        assert not missing, f"{declaration} says that it needs {missing}"
        given, declared = len(by_position), self.positions
        assert given == declared, f"{declaration} has {declared} arguments by position, not {given}"
        place, function = self.at()
        if method_of is not None:
            function = getattr(method_of, place.rpartition(".")[2])
        signature = _signature(place, function)
        complaint = self.complaint(signature)
        if complaint:
            raise BindingError(f"{self.release}: {complaint}")
        # Without a signature it is unknown which wishes the function takes. So all of them are left out.
        left_out = set(self.wishes) if signature is None else self.lacks(signature)
        arguments = {name: value for name, value in by_name.items() if name not in left_out}
        return functools.partial(function, *by_position, **arguments)

    def lacks(self, signature: inspect.Signature | None) -> set[str]:
        if signature is None:
            return set()
        return {name for name in self.wishes if not _takes(signature, name)}

    def takes(self, wish: str) -> bool:
        """Whether the installed version takes an argument of this name."""
        signature = _signature(*self.at())
        return signature is not None and _takes(signature, wish)

    def complaint(self, signature: inspect.Signature | None) -> str:
        if signature is None:
            return ""
        # Only the number and the names of arguments are checked, so that all values may be None.
        by_position = [None] * self.positions
        lacking = self.lacks(signature)
        by_name = {name: None for name in (*self.needs, *self.wishes) if name not in lacking}
        try:
            signature.bind(*by_position, **by_name)
        except TypeError as error:
            return f"{self.places[0].rpartition('.')[2]} {str(error).removeprefix('got ')}"
        return ""


class Operator(Function):
    """An operator of torch that a compiled module of a library registers. A row calls it by position."""

    def __init__(self, place: str, positions: int, loader: str) -> None:
        """place:  `library._C.name` for `torch.ops._C.name`
        loader: the module that registers it when it is imported"""
        super().__init__(place, positions=positions)
        self.loader = loader

    def at(self) -> tuple[str, Any]:
        import torch

        load(self.loader)
        place = self.places[0]
        *_, namespace, name = place.split(".")
        try:
            return place, getattr(getattr(torch.ops, namespace), name)
        except AttributeError:
            raise BindingError(f"{self.release} has no operator {name}") from None

    def signature_in(self, source: SignatureSource) -> inspect.Signature | None:
        """Also None where the source has no such operator: it may lack the compiled files with schemas."""
        with contextlib.suppress(NotThere):
            return super().signature_in(source)
        return None


Used = Symbol | tuple[Symbol, ...]
"""What a row uses of its library: a symbol, or the first of several that exists."""


def first_of(*alternatives: Symbol) -> Any:
    """The first symbol that exists. Where none exists, raises what `find` of the first one raises."""
    existing = next((symbol for symbol in alternatives if symbol.exists()), None)
    if existing is None:
        alternatives[0].find()  # raises
    return existing


def _innermost(names: list[str]) -> tuple[ModuleType, int]:
    """Imports the innermost module of a dotted name, of which the last parts may be classes. Returns the
    module and the number of parts in its name. Raises Unsupported for a module that cannot be imported."""
    for depth in range(len(names), 1, -1):
        module = ".".join(names[:depth])
        try:
            return load(module), depth
        except Unsupported as error:
            if not _is_missing(module, error.__cause__):
                raise
    return load(names[0]), 1


def _is_missing(module: str, error: BaseException | None) -> bool:
    """Whether an import failed because the module, or a package around it, is missing."""
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def _takes(signature: inspect.Signature, name: str) -> bool:
    """Whether a function takes an argument of this name by name."""
    kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return kinds.get(name) in by_name or inspect.Parameter.VAR_KEYWORD in kinds.values()


def _signature(place: str, function: VendorFunction) -> inspect.Signature | None:
    """The signature of an installed function. Some libraries wrap their functions so that they seem to take
    anything. Of such a function, the signature in its source is read. None for C++, without Python source."""
    if isinstance(function, Hashable):
        return _read_once(place, function)  # an engine under test binds at every step
    return _read(place, function)


def _read(place: str, function: VendorFunction) -> inspect.Signature | None:
    signature = signatures.of(function)
    if signature is None and not inspect.isbuiltin(function):
        with contextlib.suppress(NotThere, OSError, ValueError):
            return LibrarySource.installed(place.partition(".")[0]).signature(place)
    return signature


_read_once = functools.lru_cache(maxsize=256)(_read)


def load(module: str) -> ModuleType:
    """Imports a module. Raises Unsupported where that fails: a GPU library may need its device, driver or
    compiler for it."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Unsupported(f"{_release_of(module)} cannot be imported: {_with_causes(error)}") from error


def _with_causes(error: BaseException | None) -> str:
    """An error and its causes in one line. Some errors name the undefined symbol only in their cause."""
    reasons = []
    while error is not None:
        reasons.append(" ".join(str(error).split()) or type(error).__name__)
        error = error.__cause__
    return "; caused by: ".join(dict.fromkeys(reasons))


def _release_of(name: str) -> str:
    """The library of a dotted name, with its installed version."""
    library = name.partition(".")[0]
    return f"{library} {version(library) or ''}".strip()
