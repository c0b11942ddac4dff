"""The misses of a deployment, written as the tuners of the libraries read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.engine.view import EngineView
from harness.files import replace


def write_untuned(view: EngineView, folder: Path) -> Iterator[Path]:
    """AITER's untuned CSV files, and a list of the JSON files that an engine looks for and does not have,
    each where there is something to write in it."""
    misses = [(shape.call.op, shape.row, shape.sizes) for shape in view.shapes if shape.state == "fallback"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in view.tables.untuned(misses).items():
        replace(folder / name, text)
        yield folder / name
