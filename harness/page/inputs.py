"""Inputs of a page: which recorded results a path names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness import archive
from harness.errors import UsageError
from harness.results.read import run_folders
from harness.serving.ab.record import PLAN as AB
from harness.serving.ledger.ledger import NAME as LEDGER

RECORDS = ("run.json", "cells.jsonl", LEDGER, AB)
"""Files that stand for the folder they are in."""
EXPERIMENT = "experiment.json"
"""Of earlier releases: its folder's ledger is shown, and not the runs that its predictions came from."""


@dataclass
class Inputs:
    """Paths, each once.

    runs:      folders with run.json that are no parts of an earlier release's experiment
    abs:       folders with ab.json
    ledgers:   files of a ledger's lines
    documents: files that a command wrote with --json
    """

    runs: list[Path] = field(default_factory=list)
    abs: list[Path] = field(default_factory=list)
    ledgers: list[Path] = field(default_factory=list)
    documents: list[Path] = field(default_factory=list)


def inputs(names: Iterable[str]) -> Inputs:
    """A folder, or its archive, stands for all that is recorded below it. Raises UsageError where a name is
    nothing of it."""
    together = Inputs()
    for name in names:
        path = Path(name)
        path = path.parent if path.name in RECORDS else path
        if path.is_dir() or (path.suffix == ".zip" and archive.is_folder(path)):
            _add_folder(together, path)
        elif path.is_file() and path.suffix == ".jsonl":
            _add(together.ledgers, [path])
        elif archive.is_file(path) and path.suffix == ".json":
            _add(together.documents, [path])
        elif path.is_file():
            raise UsageError(f"{path} is no record: name a run's folder, a ledger, a --json file")
        else:
            _add(together.runs, run_folders(name))
    return together


def _add_folder(together: Inputs, folder: Path) -> None:
    ledgers = archive.below(folder, LEDGER)
    whole = {file.parent for file in archive.below(folder, EXPERIMENT)}
    runs = [file.parent for file in archive.below(folder, "run.json") if not whole & {*file.parents}]
    abs = [file.parent for file in archive.below(folder, AB)]
    if not (ledgers or runs or abs):
        documents = sorted(folder.glob("*.json"))
        runs = [] if documents else run_folders(folder)
        _add(together.documents, documents)
    _add(together.abs, abs)
    _add(together.ledgers, ledgers)
    _add(together.runs, runs)


def _add(known: list[Path], paths: Iterable[Path]) -> None:
    known += [path for path in dict.fromkeys(paths) if path not in known]
