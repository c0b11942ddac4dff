"""Published figures, which `results/published` cites. They are shown beside measured rows, but not ranked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import PUBLISHED
from shapes.case import Size

CLAIMS = "claims.json"  # the file of `results/published` with claims instead of figures


@dataclass(frozen=True)
class PublishedFigure:
    """A figure that a source published for one implementation."""

    op: str
    sizes: Mapping[str, Size]  # the sizes that the source states; an op may have more
    implementation: str
    device: str
    source: str
    where: str  # the place in the source
    method: str  # how it was timed, in the source's words or as its program shows
    time_us: float | None = None
    tflops: float | None = None

    def of(self, op: str, sizes: Mapping[str, Size]) -> bool:
        """Whether the figure is about the case of an op with these sizes."""
        return op == self.op and all(str(sizes.get(name)) == str(v) for name, v in self.sizes.items())


def figures(folder: Path = PUBLISHED) -> list[PublishedFigure]:
    """All figures, in the order of their files. Raises UsageError for a file that cannot be read."""
    published = []
    for path in sorted(path for path in folder.glob("*.json") if path.name != CLAIMS):
        document = read(path)
        about = {name: document[name] for name in ("source", "where", "method")}
        try:
            published += [PublishedFigure(**about, **entry) for entry in document["figures"]]
        except TypeError as error:
            raise UsageError(f"cannot read {path}: {error}") from None
    return published


def read(path: Path) -> JsonObject:
    """The object in a file of `results/published`. Raises UsageError where it cannot be read."""
    try:
        document: JsonObject = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    return document
