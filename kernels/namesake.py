"""Shares the name `kernels` with Hugging Face's package of that name.

transformers, and so vLLM, imports that package where it is installed, but finds ours, which comes first on
the path. So names that ours does not have are looked up in the other package: its submodules through our
package's path, its top-level names through its own `__init__`. Where the other package is not installed
nothing changes: transformers finds no version of `kernels` that it accepts, and works without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def share(ours: ModuleType) -> None:
    """Makes our package answer for the other one as well, if that is installed."""
    own_folder = Path(ours.__file__ or "").resolve().parent
    folder = _find()
    if folder is None:
        return
    ours.__path__.append(str(folder))

    def lookup(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        # `from kernels import vendor` asks for the attribute before it looks for the module, so it must get
        # our module here. Our packages are attributes already: `kernels` has imported them all.
        if (own_folder / f"{name}.py").exists():
            return importlib.import_module(f"{ours.__name__}.{name}")
        return getattr(_load(f"{ours.__name__}._namesake", folder), name)

    ours.__getattr__ = lookup  # type: ignore[method-assign]  # of a module (PEP 562)


def _find() -> Path | None:
    """The folder of the other package. It has a package `layer`, which ours does not have."""
    for entry in sys.path:
        folder = Path(entry or ".").resolve() / "kernels"
        if (folder / "layer").is_dir() and (folder / "__init__.py").exists():
            return folder
    return None


def _load(alias: str, folder: Path) -> ModuleType:
    """Imports the other package's `__init__` under another name."""
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, folder / "__init__.py")
        assert spec is not None and spec.loader is not None
        sys.modules[alias] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[alias]
            raise
    return sys.modules[alias]
