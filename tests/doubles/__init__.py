"""Doubles of libraries that need hardware: as strict as the real ones, right on a CPU, and slow.

`tests/doubles/NAME/` stands on the import path as the library's site-packages would: its package under its
real name, and a `.dist-info/METADATA` with the version that it doubles. A double takes exactly what the
library takes (arguments, dtypes, shapes, strides, layouts, metadata) and raises on anything else; its result
is computed from the layout that it is given. It is written from the library's source alone, says which file
and version each fact came from, and never imports this project.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernels import platform
from kernels.platform import Platform

HERE = Path(__file__).parent


@contextmanager
def lent(kind: str, arch: str, *names: str) -> Iterator[Platform]:
    """A platform whose device is this CPU, with the named doubles installed; they read its architecture in
    the environment variable DOUBLE_ARCH. What was imported meanwhile is forgotten, and what was imported of
    the real libraries before is set aside."""
    here = Platform(kind, arch, "cpu", f"a double of {arch}", memory=8 << 30)
    packages = {path.stem for name in names for path in (HERE / name).glob("*")}
    real = {name: m for name, m in sys.modules.items() if name.partition(".")[0] in packages}
    for name in real:
        del sys.modules[name]
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            assert (HERE / name).is_dir(), f"no double called {name}"
            patch.syspath_prepend(HERE / name)
        patch.setenv("DOUBLE_ARCH", arch)
        patch.setattr(platform, "devices", lambda: {"cpu": here})
        platform.version.cache_clear()
        try:
            yield here
        finally:
            platform.version.cache_clear()
            for module in set(sys.modules) - before:
                if any(_inside(module, HERE / name) for name in names):
                    del sys.modules[module]
            sys.modules.update(real)


def _inside(module: str, folder: Path) -> bool:
    found = sys.modules[module]
    file = getattr(found, "__file__", None)
    places = [file] if file else getattr(found, "__path__", ())  # a namespace package has no file
    return any(Path(place).is_relative_to(folder) for place in places)
