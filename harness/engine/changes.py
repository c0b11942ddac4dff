"""What two versions of a library hold otherwise for a deployment: a changelog by shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.engine.view import EngineRequest, EngineView, Shape, engine_view, unasked
from harness.errors import UsageError
from kernels.tables import Found
from kernels.tables.files import Files, TableError
from kernels.tables.lookup import LIBRARIES


@dataclass(frozen=True)
class Change:
    """of: the shape with the second version"""

    of: Shape
    before: Found
    after: Found

    @property
    def text(self) -> str:
        return f"{_what(self.before)} -> {_what(self.after)}"


@dataclass(frozen=True)
class Changes:
    """asked: shapes whose kernels look into this library"""

    library: str
    before: EngineView
    after: EngineView
    asked: int
    changes: Sequence[Change]

    def facts(self) -> dict[str, Any]:
        """As JSON has them."""
        changes = [
            {
                **{
                    name: change.of.facts()[name] for name in ("op", "sizes", "share", "row", "place", "step")
                },
                "a": _facts(change.before),
                "b": _facts(change.after),
            }
            for change in self.changes
        ]
        a, b = (view.libraries.get(self.library, "") for view in (self.before, self.after))
        return {"library": self.library, "a": a, "b": b, "asked": self.asked, "changes": changes}


def changes(request: EngineRequest, a: Path, b: Path) -> Changes:
    """Of the library that both paths hold. Raises UsageError."""
    package = _package(a, b)
    before, after = (engine_view(replace(request, paths={**request.paths, package: path})) for path in (a, b))
    pairs = [
        (now, was.found, now.found)
        for was, now in zip(before.shapes, after.shapes, strict=True)
        if was.found and now.found and before.tables.library_of(now.row) == package
    ]
    if not pairs:
        raise UsageError(unasked(request, package, before.target.arch))
    changed = [Change(*pair) for pair in pairs if _what(pair[1]) != _what(pair[2])]
    return Changes(package, before, after, len(pairs), sorted(changed, key=lambda c: -c.of.share))


def _package(a: Path, b: Path) -> str:
    """Which library both are of. Raises UsageError."""
    for package in LIBRARIES:
        try:
            Files(package, a)
        except TableError:
            continue
        try:
            Files(package, b)
        except TableError as error:
            raise UsageError(str(error)) from None
        return package
    raise UsageError(f"{a} holds none of {', '.join(LIBRARIES)}: give two checkouts, wheels or site-packages")


def _what(found: Found) -> str:
    return found.entry.kernel if found.entry else f"miss: {found.fallback}"


def _facts(found: Found) -> Mapping[str, Any]:
    return {"entry": asdict(found.entry) if found.entry else None, "fallback": found.fallback or None}
