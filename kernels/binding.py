"""Binding to libraries whose interfaces change from version to version: what is installed decides.

Providers ask here for what they need; whatever is not there is one line that names the library's version.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from kernels.op import Unsupported
from kernels.platform import version

VendorFunction = Callable[..., Any]  # a library's own, whose types are not known here


def load(module: str) -> ModuleType:
    """The imported module. Raises Unsupported where it cannot be imported: a GPU library asks for its device,
    its driver or a compiler as it is imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unsupported(f"{_named(module)} cannot be imported: {reason}") from error


def find(*places: str) -> Any:  # whatever a library has there
    """The first of the dotted places that exists, as libraries move their functions (`aiter.ops.mha.name`,
    then `aiter.name`). Raises Unsupported where none does."""
    for place in places:
        module, _, name = place.rpartition(".")
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as missing:
            if module == missing.name or module.startswith(f"{missing.name}."):
                continue
            load(module)
        except Exception:
            load(module)
        else:
            if hasattr(imported, name):
                return getattr(imported, name)
    first = places[0].partition(".")[0]
    load(first)
    raise Unsupported(f"{_named(first)} has no {' or '.join(p.partition('.')[2] for p in places)}")


def keywords(
    function: VendorFunction, needed: Mapping[str, object], wished: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Arguments by name, as this version's signature takes them: all those needed, and those wished for that
    it knows. Raises Unsupported where one that is needed is not taken, or one that it must have is missing.

    function: of Python; an operator of torch, whose schema tells; or of C++, which is given everything
    """
    takes, must, any_name = _parameters(function)
    schema = _schema(function)
    module = schema.name.partition("::")[0] if schema else getattr(function, "__module__", "") or ""
    named = _named(module)
    name = schema.name.partition("::")[2] if schema else getattr(function, "__name__", str(function))
    for argument in needed:
        if not any_name and argument not in takes:
            raise Unsupported(f"{named}'s {name} takes no {argument}")
    given = dict(needed) | {n: value for n, value in (wished or {}).items() if any_name or n in takes}
    if lacking := [argument for argument in must if argument not in given]:
        raise Unsupported(f"{named}'s {name} wants {', '.join(lacking)}, which is not known here")
    return given


def takes(function: VendorFunction, argument: str) -> bool:
    """Whether this version's function has an argument of that name."""
    names, _, any_name = _parameters(function)
    return any_name or argument in names


def _parameters(function: VendorFunction) -> tuple[list[str], list[str], bool]:
    """Names, those without a default, and whether any other name is taken too."""
    if schema := _schema(function):
        names = [a.name for a in schema.arguments]
        return names, [a.name for a in schema.arguments if not a.has_default_value()], False
    kinds = inspect.Parameter
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of C++ (pybind11), which checks arguments itself, but tells nobody their names
        return [], [], True
    by_name = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    must = [p.name for p in by_name if p.default is kinds.empty]
    return [p.name for p in by_name], must, any(p.kind is kinds.VAR_KEYWORD for p in parameters)


def _schema(function: VendorFunction) -> Any:  # torch's schema of an operator, or None
    return getattr(getattr(function, "default", function), "_schema", None)


def _named(module: str) -> str:
    root = module.partition(".")[0]
    return f"{root} {version(root) or ''}".strip()
