"""Inputs of a page: which recorded results a path names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness import archive
from harness.errors import UsageError
from harness.results.read import run_folders
from harness.serving.experiment.stages import PLAN
from harness.serving.ledger.ledger import NAME as LEDGER
from harness.serving.live.ab.journal import FILE as LIVE

RECORDS = ("run.json", "cells.jsonl", PLAN, LIVE)
"""Files that stand for the folder they are in."""


@dataclass
class Inputs:
    """Paths, each once.

    runs:        folders with run.json
    experiments: folders with experiment.json
    lives:       folders with live.jsonl that are no parts of an experiment
    ledgers:     files of lines that are none either
    documents:   files that a command wrote with --json
    """

    runs: list[Path] = field(default_factory=list)
    experiments: list[Path] = field(default_factory=list)
    lives: list[Path] = field(default_factory=list)
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
            raise UsageError(
                f"{path} is no record: name a run's folder, an experiment's, a ledger, a --json file"
            )
        else:
            _add(together.runs, run_folders(name))
    return together


def _add_folder(together: Inputs, folder: Path) -> None:
    experiments = [file.parent for file in archive.below(folder, PLAN)]
    lives = [file.parent for file in _outside(experiments, archive.below(folder, LIVE))]
    ledgers = _outside(experiments, archive.below(folder, LEDGER))
    runs = [file.parent for file in _outside([*experiments, *lives], archive.below(folder, "run.json"))]
    if not (experiments or lives or ledgers or runs):
        documents = sorted(folder.glob("*.json"))
        runs = [] if documents else run_folders(folder)
        _add(together.documents, documents)
    _add(together.experiments, experiments)
    _add(together.lives, lives)
    _add(together.ledgers, ledgers)
    _add(together.runs, runs)


def _outside(folders: Iterable[Path], files: Iterable[Path]) -> list[Path]:
    """Files that are no parts of the folders."""
    inner = set(folders)
    return [file for file in files if not inner.intersection(file.parents)]


def _add(known: list[Path], paths: Iterable[Path]) -> None:
    known += [path for path in dict.fromkeys(paths) if path not in known]
