"""Which two runs are compared: a row of a client's file or a published run, by name, and their engines."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from pathlib import Path

from harness import archive
from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.integrity import examined
from harness.serving.names import known_engine
from harness.serving.published.documents import FOLDER, documents
from harness.serving.schema import ServingRun

FROM_SETUP = ("image", "flags", "environment", "parallelism")


@functools.cache
def published_runs() -> dict[str, ServingRun]:
    """By id: the runs of the documents, and of raw files behind them as `dstack.online:31`, which have the
    documented configuration of their machine, engine and version if there is one."""
    every = [*documents(FOLDER), *documents(FOLDER / "others")]
    known = {run.id: examined(run) for document in every for run in document.runs}
    setups = [setup for document in every for setup in document.configurations if setup.version]
    for run in (run for path in sorted(FOLDER.glob("*/*.csv")) for run in load(path)):
        own = (run.hardware, run.engine, run.version)
        alike = [setup for setup in setups if (setup.hardware, setup.engine, setup.version) == own]
        update: dict[str, object] = {"id": f"{run.client}:{run.source.rpartition(':')[2]}"}
        if len(alike) == 1:
            update |= {name: getattr(alike[0], name) for name in FROM_SETUP}
            update["configuration"] = alike[0].name
        known[str(update["id"])] = run.model_copy(update=update)
    return known


def find(name: str) -> ServingRun:
    """A published run by its id, or a row of a file: `FILE`, `FILE:ROW` where it has several, or the id that
    `serving load` gives it. Where ids have no line, ROW counts from 1. Raises UsageError."""
    paths = (name, name.rpartition(":")[0], name.rpartition("[")[0])
    path = next((path for path in paths if path and archive.is_file(Path(path))), "")
    if not path:
        known = published_runs()
        if Path(name).is_dir():
            raise UsageError(f"cannot read {name}: it is a directory; name one file in it")
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, 6, 0.5) or sorted(known)[:6])
            raise UsageError(f"{name!r} is neither a file nor the id of a published run (such as {near})")
        return known[name]
    runs = load(path)
    by_line = any(run.id.rpartition(":")[2].isdigit() for run in runs)
    by_row = {str(number): run for number, run in enumerate(runs, 1) if not by_line}
    by_row |= {run.id.removeprefix(path).lstrip(":"): run for run in reversed(runs)}
    row = name.removeprefix(path).lstrip(":")
    if not row and len(runs) == 1:
        return runs[0]
    if row in by_row:
        return by_row[row]
    ids = ", ".join(run.id for run in runs[:3]) + (" ..." if runs[3:] else "")
    wrong = f"none is {row!r}" if row else "one is to be named"
    raise UsageError(f"{path} has {len(runs)} run{'s' if runs[1:] else ''}, and {wrong}: {ids}")


def engines_of(options: Sequence[str]) -> dict[str, str]:
    """The engines of A and of B that `NAME`, `A=NAME` or `B=NAME` give; empty where none is given."""
    engines = {"A": "", "B": ""}
    for option in options:
        side, _, name = option.rpartition("=")
        if side not in ("", "A", "B"):
            raise UsageError(f"cannot read --engine {option!r}; write NAME, A=NAME or B=NAME")
        engines |= dict.fromkeys([side] if side else engines, known_engine(name))
    return engines
