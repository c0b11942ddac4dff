"""Which two runs are compared: a row of a client's file or a published run, by name, and their engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import archive
from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.names import known_engine
from harness.serving.published.index import published_runs
from harness.serving.schema import ServingRun


def find(name: str) -> ServingRun:
    """A published run by its id, or a row of a file: `FILE`, or `FILE:ROW` where it has several.

    ROW is a line as the ids of `serving load` have it, or else counted from 1. Raises UsageError.
    """
    path, _, row = name.rpartition(":")
    if archive.is_file(Path(name)):
        path, row = name, ""
    elif not (path and archive.is_file(Path(path))):
        known = published_runs()
        if name not in known:
            near = ", ".join(sorted(known)[:6])
            raise UsageError(f"{name!r} is neither a file nor the id of a published run (such as {near})")
        return known[name]
    runs = load(path)
    by_line = any(run.id.rpartition(":")[2].isdigit() for run in runs)
    by_row = {str(number): run for number, run in enumerate(runs, 1) if not by_line}
    by_row |= {run.id.removeprefix(f"{path}:"): run for run in reversed(runs)}
    if not row and len(runs) == 1:
        return runs[0]
    if row in by_row:
        return by_row[row]
    ids = ", ".join(run.id for run in runs[:3]) + (" ..." if runs[3:] else "")
    wrong = f"none is {row!r}" if row else "one is to be named"
    raise UsageError(f"{path} has {len(runs)} runs, and {wrong}: {ids}")


def engines_of(options: Sequence[str]) -> dict[str, str]:
    """The engines of A and of B that `NAME`, `A=NAME` or `B=NAME` give; empty where none is given."""
    engines = {"A": "", "B": ""}
    for option in options:
        side, _, name = option.rpartition("=")
        if side not in ("", "A", "B"):
            raise UsageError(f"cannot read --engine {option!r}; write NAME, A=NAME or B=NAME")
        engines |= dict.fromkeys([side] if side else engines, known_engine(name))
    return engines
