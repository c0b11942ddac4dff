"""Ops, and implementations of them: what is measured.

An op is a folder here with a package that has `OP`. An implementation is a function that
`kernels.op.implementation` declares, or a subclass of `Implementation`, in any module of that folder, of its
`providers/` (one file for each library) or of its `triton/` (the suite's own kernels). Modules named `*_jit`
hold Triton or TileLang sources and are imported only to run. A module `cases` of the folder brings its cases
for the suites, as the modules of shapes/cases do. Nothing is registered anywhere else.

Kernels and ops of your own are named in the environment variable KERNEL_BENCH_PLUGINS (several are separated
by `:`).

- A file's implementations join the op that their `op` names. They have workers of their own, and only those
  import them (see `import_plugins`).
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
from kernels.plugin_process import PluginImplementation, PluginProcess, told
from shapes import suites

_HERE = Path(__file__).parent
PLUGINS = "KERNEL_BENCH_PLUGINS"


@functools.cache
def implementations(op: str) -> list[Implementation]:
    """All implementations of an op, by name; importing them imports no library.

    Raises PluginError where a plugin cannot be imported or takes a name that is taken.
    """
    package = importlib.import_module(f"kernels.{op}")
    modules = map(importlib.import_module, _module_names(package.__name__, package.__path__))
    found = [implementation for module in modules for implementation in _defined(module)]
    for implementation in found:
        implementation.op = implementation.op or op
    for path in plugin_files():
        if path.is_dir():
            _plugin(path)
        else:
            found += _plugin_implementations(path, _importing)
    by_name: dict[str, Implementation] = {}
    for implementation in found:
        if implementation.op != op:
            continue
        if other := by_name.get(implementation.name):
            files = sorted({each.plugin or inspect.getfile(type(each)) for each in (other, implementation)})
            raise PluginError(f"{other.name} of {op} is declared twice, in {' and '.join(files)}")
        by_name[implementation.name] = implementation
    return [by_name[name] for name in sorted(by_name)]


def _defined(module: ModuleType) -> Iterator[Implementation]:
    for value in vars(module).values():
        # Its own type: in Python 3.10 isinstance takes an alias such as list[int] for a class.
        if not (issubclass(type(value), type) and issubclass(value, Implementation)):
            continue
        if value.__module__ == module.__name__ and "name" in vars(value):
            yield value()


_importing = False


def import_plugins() -> None:
    """From now on this process imports plug-ins: it is a worker, or one that compiles or tunes them. Others
    ask a process of the plug-in's own (see plugin_process.py)."""
    global _importing
    _importing = True
    implementations.cache_clear()


def name_plugins(paths: str) -> None:
    """Sets KERNEL_BENCH_PLUGINS in this process, and forgets what its former value brought."""
    os.environ[PLUGINS] = paths
    implementations.cache_clear()
    _plugin_implementations.cache_clear()


@functools.cache
def _plugin_implementations(path: Path, importing: bool) -> list[Implementation]:
    if importing:
        return implementations_of(path)
    process = PluginProcess(path)
    return [PluginImplementation(process, facts) for facts in process.ask("list")]


def implementations_of(path: Path) -> list[Implementation]:
    """The implementations of a plug-in's file, which is imported here. They share no worker with others.
    Raises PluginError where there is none, or one that cannot be right."""
    found = list(_defined(_plugin(path)))
    if not found:
        raise PluginError(f"{path} declares no implementation: see @implementation in kernels/op.py")
    for implementation in found:
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
    return found


def _module_names(package: str, folders: Iterable[str]) -> Iterator[str]:
    """Dotted names of the modules in a package and in the packages inside it, but for sources of kernels and
    for mistakes, which import torch."""
    for module in pkgutil.iter_modules(folders):
        name = f"{package}.{module.name}"
        if module.ispkg:
            yield from _module_names(name, [str(Path(folder) / module.name) for folder in folders])
        elif not module.name.endswith(("_jit", "mistakes")):
            yield name


def plugin_files() -> list[Path]:
    return [Path(path).resolve() for path in os.environ.get(PLUGINS, "").split(os.pathsep) if path]


def load_plugins() -> list[ModuleType]:
    """The folders that KERNEL_BENCH_PLUGINS names, imported once; its files too, if this process imports
    them. Raises PluginError for what cannot be used."""
    return [_plugin(path) for path in plugin_files() if _importing or path.is_dir()]


@functools.cache
def _plugin(path: Path) -> ModuleType:
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
        raise PluginError(f"cannot import {path}, named by {PLUGINS}: {told(error)}") from error
    return module


def _add_op(package: ModuleType) -> None:
    """Adds a package's op, and its cases to the suites where it has some."""
    name = package.__name__.rpartition(".")[2]
    OPS[name] = package.OP
    cases = f"{package.__name__}.cases"
    if importlib.util.find_spec(cases) is not None:
        suites.add(name, importlib.import_module(cases))


namesake.share(sys.modules[__name__])

for _module in pkgutil.iter_modules([str(_HERE)]):
    if _module.ispkg and hasattr(_package := importlib.import_module(f"kernels.{_module.name}"), "OP"):
        _add_op(_package)
for _path in plugin_files():
    # Asking for an op or for implementations tells of a plug-in that cannot be used.
    with contextlib.suppress(PluginError):
        if _path.is_dir():
            _plugin(_path)
