"""Journal of a run: run.json, written once, and cells.jsonl, to which each finished case is added."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from harness import archive, files
from harness.errors import UsageError, mistake
from harness.paths import writable
from harness.results.schema import SCHEMA, Calibration, CaseDone, Cell, DeviceUsed, Record, Run, Verdict

RECORD: TypeAdapter[Record] = TypeAdapter(
    Annotated[Cell | Verdict | CaseDone | DeviceUsed | Calibration, Field(discriminator="kind")]
)
COMPLETE = ("case", "device", "calibration")
"""Kinds of records after which a journal is complete: that of a case follows its cells and verdicts."""


class Journal:
    """Reads one run folder, and appends to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells = folder / "cells.jsonl"
        self.lines = files.JsonLines(self.cells, RECORD.validate_json, archive.read_bytes, _complete_bytes)

    @staticmethod
    def require_new(folder: Path) -> None:
        """Raises UsageError where a run cannot be made in the folder, which need not exist."""
        if (folder / "run.json").exists():
            raise UsageError(f"{folder} already holds a run; choose another --out, or --resume {folder}")
        if not writable(folder.absolute()):
            raise UsageError(f"cannot write results to {folder}: no writable folder; choose another --out")

    @staticmethod
    def create(folder: Path, run: Run) -> Journal:
        """Writes run.json and an empty journal. Raises UsageError, as `require_new` does."""
        journal = Journal(folder)
        journal.require_new(folder)
        with files.explained(f"cannot write results to {folder}", "; choose another --out"):
            folder.mkdir(parents=True, exist_ok=True)
            journal.cells.touch()
            files.replace(folder / "run.json", run.model_dump_json(indent=1) + "\n")
        return journal

    def append(self, records: Iterable[Record]) -> None:
        """Adds a finished case, which is on the disk when this returns. If a kill left a part of an
        unfinished case at the end of the file, that is cut off first. Raises JournalFull."""
        self.lines.append(*(record.model_dump_json() for record in records))

    def remove(self) -> None:
        """Removes a run of which nothing was measured, with its folder if nothing else is in it."""
        self.cells.unlink()
        (self.folder / "run.json").unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def run(self) -> Run:
        """Raises UsageError where run.json cannot be read, or its schema is newer."""
        path = self.folder / "run.json"
        with files.explained(f"cannot read {path}"):
            text = archive.read_bytes(path)
        try:
            version = json.loads(text).get("schema_version")
            if not isinstance(version, int):
                raise UsageError(f"{path} is not a run of this suite: it has no schema_version")
            if version > SCHEMA:
                known = f"this version of the suite reads up to {SCHEMA}: update it"
                raise UsageError(f"{path} has schema {version}; {known}")
            return Run.model_validate_json(text)
        except (ValueError, AttributeError) as error:
            raise UsageError(f"cannot read {path}: {mistake(error)}") from None

    def finished(self) -> dict[str, list[Record]]:
        """The cells, verdicts and CaseDone of each finished case by its key, in recorded order; of a case
        that was measured twice the last ones. A last line that was cut off is ignored. Raises UsageError,
        which names the line, for any other line that cannot be read."""
        cases: dict[str, list[Record]] = {}
        pending: list[Cell | Verdict | CaseDone] = []
        for record in self.lines.records():
            if not isinstance(record, Cell | Verdict | CaseDone):
                continue
            pending.append(record)
            if isinstance(record, CaseDone):  # what a kill left of another case is pending, too
                cases[record.case] = [r for r in pending if r.case == record.case]
                pending = []
        return cases

    def devices(self) -> list[DeviceUsed]:
        """The devices of a cluster that measured the run; empty where it ran on one machine."""
        return [record for record in self.lines.records() if isinstance(record, DeviceUsed)]

    def calibrations(self) -> list[Calibration]:
        return [record for record in self.lines.records() if isinstance(record, Calibration)]


def _complete_bytes(data: bytes) -> int:
    """How many bytes a journal has up to the end of its last record of a kind in COMPLETE."""
    line_end = files.whole_lines(data)
    while line_end:
        line_start = data.rfind(b"\n", 0, line_end - 1) + 1
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that is no record
            if json.loads(data[line_start:line_end])["kind"] in COMPLETE:
                break
        line_end = line_start
    return line_end
