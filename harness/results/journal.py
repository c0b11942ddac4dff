"""Journal of a run: its run.json, written once, and cells.jsonl, to which each finished case is added."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from harness import archive, files
from harness.errors import HarnessError, UsageError, mistake
from harness.results.schema import SCHEMA, Calibration, CaseDone, Cell, DeviceUsed, Record, Run, Verdict

KINDS: dict[str, type[Record]] = {
    "cell": Cell,
    "verdict": Verdict,
    "case": CaseDone,
    "device": DeviceUsed,
    "calibration": Calibration,
}
WHOLE = ("case", "device", "calibration")
"""Kinds that end what a kill must not leave in pieces."""


class JournalChanged(HarnessError):
    """Its finished cases are not what was written."""


class Journal:
    """Appends to, and reads, one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells = folder / "cells.jsonl"
        self.written, self.length, self.seen = hashlib.sha256(), 0, (0, 0, 0)
        self.lines = files.JsonLines(self.cells, _record, archive.read_bytes, _finished_cases)

    @staticmethod
    def create(folder: Path, run: Run) -> Journal:
        journal = Journal(folder)
        if (folder / "run.json").exists():
            raise UsageError(f"{folder} already holds a run; choose another --out, or --resume {folder}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            journal.cells.touch()
            files.replace(folder / "run.json", run.model_dump_json(indent=1) + "\n")
        except OSError as error:
            reason = f"cannot write results to {folder}: {error.strerror}"
            raise UsageError(f"{reason}; choose another --out") from None
        return journal

    def append(self, records: Iterable[Record]) -> None:
        """Adds a finished case, on the disk when this returns. What an earlier kill left of an unfinished
        one, whole lines of it too, is cut off first. Raises JournalFull, and JournalChanged where what this
        process wrote was rewritten: a kernel that is measured may have reached it."""
        if self.length and self._status() != self.seen:
            data = self.cells.read_bytes()
            if (
                len(data) < self.length
                or hashlib.sha256(data[: self.length]).digest() != self.written.digest()
            ):
                raise JournalChanged(
                    f"{self.cells} was changed by another process while it was being written"
                )
        self.lines.append(*(record.model_dump_json() for record in records))
        with self.cells.open("rb") as file:
            file.seek(self.length)
            self.written.update(file.read())
            self.length = file.tell()
        self.seen = self._status()

    def _status(self) -> tuple[int, int, int]:
        """Another after each write to the file: its contents need not be read to know them untouched."""
        status = self.cells.stat()
        return status.st_ino, status.st_size, status.st_ctime_ns

    def remove(self) -> None:
        """Of a run that nothing was measured of: its folder too, if nothing else is in it."""
        for name in (self.cells, self.folder / "run.json"):
            name.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def run(self) -> Run:
        path = self.folder / "run.json"
        try:
            text = archive.read_bytes(path)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        try:
            version = json.loads(text).get("schema_version")
            if not isinstance(version, int):
                raise UsageError(f"{path} is not a run of this suite: it has no schema_version")
            if version > SCHEMA:
                raise UsageError(
                    f"{path} has schema {version}; this version of the suite reads up to {SCHEMA}: update it"
                )
            return Run.model_validate_json(text)
        except (ValueError, AttributeError) as error:
            raise UsageError(f"cannot read {path}: {mistake(error)}") from None

    def finished(self) -> dict[str, list[Record]]:
        """Finished cases by key, in order: the records of each. A cut-off last line is ignored; anything
        else that cannot be read is an error that names the line."""
        cases: dict[str, list[Record]] = {}
        pending: list[Record] = []
        for record in self.lines.records():
            if isinstance(record, (DeviceUsed, Calibration)):
                continue
            pending.append(record)
            if isinstance(record, CaseDone):
                cases[record.case] = [r for r in pending if getattr(r, "case", None) == record.case]
                pending = []
        return cases

    def devices(self) -> list[DeviceUsed]:
        """Those of a cluster that measured it; empty where one machine did."""
        return [record for record in self.lines.records() if isinstance(record, DeviceUsed)]

    def calibrations(self) -> list[Calibration]:
        """What its devices measured alike."""
        return [record for record in self.lines.records() if isinstance(record, Calibration)]


def _record(line: bytes) -> Record:
    return KINDS[json.loads(line)["kind"]].model_validate_json(line)


def _finished_cases(data: bytes) -> int:
    """How many bytes end with the last finished case."""
    end = files.whole_lines(data)
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(data[start:end])["kind"] in WHOLE:
                break
        end = start
    return end
