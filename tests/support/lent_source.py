"""Some files of a package whose import needs more than is here, between empty modules of its other names."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def nothing(_: Any, name: str) -> Any:
    """A class of any name without a body: to import, to inherit and to annotate with, nothing else."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing(name, (), {})


class Nothing(type):
    __getattr__ = nothing


class Empty(ModuleType):
    __getattr__ = nothing


class Lent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A package's modules: their own files where they are real, else empty but for what is given."""

    def __init__(self, package: str, real: set[str], given: Mapping[str, Mapping[str, Any]]) -> None:
        self.package, self.real, self.given = package, real, given
        self.folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != self.package:
            return None
        if name in self.real:
            file = self.folder.joinpath(*name.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.given.get(module.__name__, {}))


def lend(package: str, real: set[str], given: Mapping[str, Mapping[str, Any]]) -> None:
    """For the rest of the process, of which nothing may have imported the package.

    given: what the real files use of the others, by module and name
    """
    sys.meta_path.insert(0, Lent(package, real, given))
    for name in given:  # before `from package import given` finds nothing of that name
        importlib.import_module(name)
