"""Ops, and implementations of them: what is measured.

An op is a folder here with a package that has `OP`. An implementation is a function that
`kernels.op.implementation` declares, or a subclass of `Implementation`, in any module of that folder, of its
`providers/` (one file for each library) or of its `triton/` (the suite's own kernels). Modules named `*_jit`
hold Triton or TileLang sources and are imported only to run. A module `cases` of the folder brings its cases
for the suites, as the modules of shapes/cases do. Nothing is registered anywhere else.

The environment variable KERNEL_BENCH_PLUGINS names kernels and ops of your own, separated by `:`.

- A file's implementations join the op that their `op` names. Only their own workers import the file.
- A folder is an op like those here, imported as `kernels.<folder>`, so that its modules import each other.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from kernels import namesake
from kernels.op import OPS, Implementation
from kernels.plugin_process import PluginError as PluginError
from kernels.plugin_process import PluginImplementation, PluginProcess, describe_error
from shapes import suites

PLUGINS = "KERNEL_BENCH_PLUGINS"


@functools.cache
def implementations(op: str) -> list[Implementation]:
    """All implementations of an op, sorted by name. Importing their modules imports no library.

    Raises PluginError for a plug-in that cannot be imported, and where two have the same name.
    """
    package = importlib.import_module(f"kernels.{op}")
    candidates: list[Implementation] = []
    for module in _module_names(package.__name__, package.__path__):
        candidates += _declared_in(importlib.import_module(module))
    for candidate in candidates:
        candidate.op = candidate.op or op
    for path in plugin_files():
        if path.is_dir():
            _import_plugin(path)  # raises here what `_add_ops` suppressed
        else:
            candidates += _plugin_implementations(path)
    by_name: dict[str, Implementation] = {}
    for candidate in candidates:
        if candidate.op != op:
            continue
        if first := by_name.get(candidate.name):
            files = sorted({row.plugin or inspect.getfile(type(row)) for row in (first, candidate)})
            raise PluginError(f"{candidate.name} of {op} is declared twice, in {' and '.join(files)}")
        by_name[candidate.name] = candidate
    return [by_name[name] for name in sorted(by_name)]


def _declared_in(module: ModuleType) -> Iterator[Implementation]:
    """Makes an instance of each class of a module that is an implementation with a name of its own."""
    for value in vars(module).values():
        # `isinstance(value, type)` would be true of an alias such as list[int] in Python 3.10.
        is_class = issubclass(type(value), type)
        if not is_class or not issubclass(value, Implementation):
            continue
        if value.__module__ == module.__name__ and "name" in vars(value):
            yield value()


_imports_plugins = False
"""Whether this process imports the files of plug-ins itself. See `import_plugins`, which sets it."""


def import_plugins() -> None:
    """Makes this process import the files of plug-ins itself when it next lists implementations: it is a
    worker, or it compiles or tunes them. By default another process imports each (see plugin_process.py)."""
    global _imports_plugins
    _imports_plugins = True
    implementations.cache_clear()
    _plugin_implementations.cache_clear()


def name_plugins(paths: str) -> None:
    """Sets KERNEL_BENCH_PLUGINS in this process, and forgets the implementations of its former value."""
    os.environ[PLUGINS] = paths
    implementations.cache_clear()
    _plugin_implementations.cache_clear()


@functools.cache
def _plugin_implementations(path: Path) -> list[Implementation]:
    if _imports_plugins:
        return implementations_of(path)
    process = PluginProcess(path)
    return [PluginImplementation(process, facts) for facts in process.ask("list")]


def implementations_of(path: Path) -> list[Implementation]:
    """Imports a plug-in's file here, and returns its implementations. Each gets a runtime that only those of
    this file have, so that it shares no worker with others. Raises PluginError for a file without any
    implementation, and for an implementation whose op, name or class is not valid."""
    declared = list(_declared_in(_import_plugin(path)))
    if not declared:
        raise PluginError(f"{path} declares no implementation: see @implementation in kernels/op.py")
    for implementation in declared:
        if implementation.op not in OPS:
            ops = ", ".join(OPS)
            raise PluginError(f"{path}: {implementation.name} has op {implementation.op!r}; ops are {ops}")
        if type(implementation).prepare is Implementation.prepare:
            raise PluginError(f"{path}: class {type(implementation).__name__} defines no prepare")
        if not re.fullmatch(r"[\w.@+-]+", implementation.name):
            raise PluginError(f"{path}: the name {implementation.name!r} is not of letters, digits and ._-+@")
        implementation.plugin = str(path)
        implementation.requires = implementation.requires or path.name  # type: ignore[misc]
        implementation.runtime = f"{path.stem}.{implementation.runtime}"  # type: ignore[misc]
    return declared


def _module_names(package: str, folders: Iterable[str]) -> Iterator[str]:
    """Dotted names of the modules in a package, which has these folders, and in the packages inside it. Left
    out are kernels' sources (`*_jit`) and lists of mistakes, which import torch or Triton."""
    for module in pkgutil.iter_modules(folders):
        name = f"{package}.{module.name}"
        if module.ispkg:
            yield from _module_names(name, [str(Path(folder) / module.name) for folder in folders])
        elif not module.name.endswith(("_jit", "mistakes")):
            yield name


def plugin_files() -> list[Path]:
    """The files and folders that KERNEL_BENCH_PLUGINS names."""
    return [Path(path).resolve() for path in os.environ.get(PLUGINS, "").split(os.pathsep) if path]


def load_plugins() -> list[ModuleType]:
    """Imports the folders that KERNEL_BENCH_PLUGINS names, and after `import_plugins` its files too. Raises
    PluginError for what cannot be used."""
    return [_import_plugin(path) for path in plugin_files() if _imports_plugins or path.is_dir()]


@functools.cache
def _import_plugin(path: Path) -> ModuleType:
    """Imports a plug-in's file or folder once, and adds the op of a folder. Raises PluginError."""
    if path.is_dir():
        name, file, folders = f"kernels.{path.name}", path / "__init__.py", [str(path)]
    else:
        name, file, folders = f"kernel_bench_plugin_{path.stem}", path, None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None or not file.is_file():
        raise PluginError(f"{PLUGINS} names {path}, which is not a Python file or package")
    if path.is_dir() and importlib.util.find_spec(name) is not None:
        raise PluginError(f"{PLUGINS} names {path}, but kernels/ has a {path.name} already")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        if path.is_dir():
            _add_op(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"cannot import {path}, named by {PLUGINS}: {describe_error(error)}") from error
    return module


def _add_op(package: ModuleType) -> None:
    """Adds a package's op to OPS, and its cases to the suites where it has a module `cases`."""
    name = package.__name__.rpartition(".")[2]
    OPS[name] = package.OP
    cases = f"{package.__name__}.cases"
    if importlib.util.find_spec(cases) is not None:
        suites.add(name, importlib.import_module(cases))


def _add_ops() -> None:
    """Adds the ops of the folders beside this file, and of those that KERNEL_BENCH_PLUGINS names."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.ispkg:
            package = importlib.import_module(f"kernels.{module.name}")
            if hasattr(package, "OP"):
                _add_op(package)
    for path in plugin_files():
        if path.is_dir():
            # An unusable folder must not break `import kernels`: `implementations` raises its error.
            with contextlib.suppress(PluginError):
                _import_plugin(path)


namesake.share(sys.modules[__name__])  # before packages are imported, which may import from `kernels`
_add_ops()
