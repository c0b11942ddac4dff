"""Published figures: cited data of `results/published`, shown beside measured rows and never ranked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import PUBLISHED
from shapes.case import Size

CLAIMS = "claims.json"


@dataclass(frozen=True)
class PublishedFigure:
    """What somebody published of one implementation.

    sizes:  those that the source states; a case has them all, and maybe others
    method: how it was timed, in the source's words or as its program shows
    """

    op: str
    sizes: Mapping[str, Size]
    implementation: str
    device: str
    source: str
    where: str
    method: str
    time_us: float | None = None
    tflops: float | None = None

    def of(self, op: str, sizes: Mapping[str, Size]) -> bool:
        """Whether it is of a case of these sizes."""
        return op == self.op and all(str(sizes.get(name)) == str(v) for name, v in self.sizes.items())


def figures(folder: Path = PUBLISHED) -> list[PublishedFigure]:
    """All of them, in the order of their files. Raises UsageError where one cannot be read."""
    published = []
    for path in sorted(folder.glob("*.json")):
        if path.name != CLAIMS:
            document = read(path)
            about = {name: document[name] for name in ("source", "where", "method")}
            try:
                published += [PublishedFigure(**about, **entry) for entry in document["figures"]]
            except TypeError as error:
                raise UsageError(f"cannot read {path}: {error}") from None
    return published


def read(path: Path) -> JsonObject:
    try:
        document: JsonObject = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    return document
