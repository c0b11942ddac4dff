"""What is measured: ops, and implementations of them.

An op is a folder here whose package has `OP`; an implementation is a subclass of `Implementation`
in any module of that folder, of its `providers/` (one file for each library) or of its `triton/` (the
suite's own kernels); those named `*_jit` hold Triton sources and are imported only to run.
Nothing is registered anywhere else. A kernel of your own joins without touching this folder: name its
file in the environment variable KERNEL_BENCH_PLUGINS (several are separated by `:`) and give its
class an `op`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from kernels import namesake
from kernels.op import OPS, Implementation

_HERE = Path(__file__).parent
PLUGINS = "KERNEL_BENCH_PLUGINS"


class PluginError(Exception):
    """A plugin that cannot be used; one line for its author."""


@functools.cache
def implementations(op: str) -> list[Implementation]:
    """All implementations of an op, by name; importing them imports no library.

    Raises PluginError where a plugin cannot be imported or takes a name that is taken.
    """
    by_name: dict[str, Implementation] = {}
    for module in _modules(op):
        for value in vars(module).values():
            if not (isinstance(value, type) and issubclass(value, Implementation)):
                continue
            if value.__module__ != module.__name__ or "name" not in vars(value):
                continue
            implementation = value()
            implementation.op = implementation.op or op
            if implementation.op != op:
                continue
            if implementation.name in by_name:
                raise PluginError(f"two implementations of {op} are called {implementation.name}")
            by_name[implementation.name] = implementation
    return [by_name[name] for name in sorted(by_name)]


def _modules(op: str) -> Iterator[ModuleType]:
    for name in _module_names(f"kernels.{op}", _HERE / op):
        yield importlib.import_module(name)
    yield from map(_plugin, plugin_files())


def _module_names(package: str, folder: Path) -> Iterator[str]:
    """Dotted names of the modules in a package and in the packages inside it, but for Triton sources."""
    for module in pkgutil.iter_modules([str(folder)]):
        name = f"{package}.{module.name}"
        if module.ispkg:
            yield from _module_names(name, folder / module.name)
        elif not module.name.endswith("_jit"):
            yield name


def plugin_files() -> list[Path]:
    return [Path(path).resolve() for path in os.environ.get(PLUGINS, "").split(os.pathsep) if path]


@functools.cache
def _plugin(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kernel_bench_plugin_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise PluginError(f"{PLUGINS} names {path}, which is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PluginError(f"cannot import {path}, named by {PLUGINS}: {reason}") from error
    return module


namesake.share(sys.modules[__name__])

OPS.update(
    (module.name, importlib.import_module(f"kernels.{module.name}").OP)
    for module in pkgutil.iter_modules([str(_HERE)])
    if module.ispkg
)
