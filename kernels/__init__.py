"""What is measured: ops, and implementations of them.

An op is a folder here whose package has `OP`; an implementation is a subclass of `Implementation`
in any of that folder's modules (those named `*_jit` hold Triton sources and are imported only to run).
Nothing is registered anywhere else.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from pathlib import Path

from kernels import namesake
from kernels.op import Implementation, Op

_HERE = Path(__file__).parent


@functools.cache
def implementations(op: str) -> list[Implementation]:
    """All implementations of an op, by name; importing them imports no library."""
    found = {}
    for module in pkgutil.iter_modules([str(_HERE / op)]):
        if module.name.endswith("_jit"):
            continue
        for value in vars(importlib.import_module(f"kernels.{op}.{module.name}")).values():
            concrete = isinstance(value, type) and issubclass(value, Implementation)
            if concrete and "name" in vars(value) and value.__module__ == f"kernels.{op}.{module.name}":
                found[value.name] = value()
                found[value.name].op = op
    return [found[name] for name in sorted(found)]


namesake.share(sys.modules[__name__])

OPS: dict[str, Op] = {
    module.name: importlib.import_module(f"kernels.{module.name}").OP
    for module in pkgutil.iter_modules([str(_HERE)])
    if module.ispkg
}
