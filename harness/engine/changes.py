"""What two versions of a library hold differently for the shapes of a deployment."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.engine.view import EngineRequest, EngineView, Shape, engine_view, unasked
from harness.errors import UsageError
from kernels.tables.files import Files, TableError
from kernels.tables.lookup import LIBRARIES


@dataclass(frozen=True)
class Change:
    """A shape for which the two versions run something else."""

    before: Shape
    after: Shape

    @property
    def runs(self) -> tuple[str, str]:
        """For each version the kernel of the entry, or what a miss runs."""
        return _runs(self.before), _runs(self.after)

    def facts(self) -> dict[str, Any]:
        """The object of JSON."""
        a, b = self.before.facts(), self.after.facts()
        shape = {name: b[name] for name in ("op", "sizes", "share", "row", "place", "step")}
        found = ("entry", "fallback")
        return shape | {"a": {name: a[name] for name in found}, "b": {name: b[name] for name in found}}


@dataclass(frozen=True)
class Changes:
    """The changes of one library, the largest shares of the time first.

    asked: how many shapes have kernels that look into this library's tables
    """

    library: str
    before: EngineView
    after: EngineView
    asked: int
    changes: Sequence[Change]

    def facts(self) -> dict[str, Any]:
        """The object of JSON."""
        a, b = (view.libraries[self.library] for view in (self.before, self.after))
        changes = [change.facts() for change in self.changes]
        return {"library": self.library, "a": a, "b": b, "asked": self.asked, "changes": changes}


def changes(request: EngineRequest, a: Path, b: Path) -> Changes:
    """Compares the library that lies at both paths. Raises UsageError, also where nothing asks it."""
    package = _package(a)
    before, after = (engine_view(replace(request, paths={**request.paths, package: path})) for path in (a, b))
    pairs = [
        Change(was, now)
        for was, now in zip(before.shapes, after.shapes, strict=True)
        if now.found and before.tables.library_of(now.row) == package
    ]
    if not pairs:
        raise UsageError(unasked(request, package, before.target.arch))
    changed = [pair for pair in pairs if _runs(pair.before) != _runs(pair.after)]
    return Changes(package, before, after, len(pairs), sorted(changed, key=lambda c: -c.after.share))


def _package(path: Path) -> str:
    """The library that lies there. Raises UsageError."""
    for package in LIBRARIES:
        with contextlib.suppress(TableError):
            Files(package, path)
            return package
    raise UsageError(
        f"{path} holds none of {', '.join(LIBRARIES)}: give two checkouts, wheels or site-packages"
    )


def _runs(shape: Shape) -> str:
    return shape.entry.kernel if shape.entry else f"miss: {shape.fallback}"
