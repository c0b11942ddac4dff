"""Journal of a run: its run.json, written once, and cells.jsonl, to which each finished case is added."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from harness import archive, files
from harness.errors import UsageError, mistake, one_line
from harness.results.schema import SCHEMA, CaseDone, Cell, Record, Run, Verdict

KINDS: dict[str, type[Record]] = {"cell": Cell, "verdict": Verdict, "case": CaseDone}


class Journal:
    """Appends to, and reads, one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells = folder / "cells.jsonl"

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
        one, whole lines of it too, is cut off first. Raises files.JournalFull."""
        lines = "".join(record.model_dump_json() + "\n" for record in records)
        files.append_to_journal(self.cells, lines, _finished_cases)

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
        except ValidationError as error:
            raise UsageError(f"cannot read {path}: {mistake(error)}") from None
        except (ValueError, AttributeError) as error:
            raise UsageError(f"cannot read {path}: {one_line(error)}") from None

    def finished(self) -> dict[str, list[Record]]:
        """Finished cases by key, in order: the records of each. A cut-off last line is ignored; anything
        else that cannot be read is an error that names the line."""
        try:
            data = archive.read_bytes(self.cells)
        except OSError as error:
            raise UsageError(f"cannot read {self.cells}: {error.strerror}") from None
        cases: dict[str, list[Record]] = {}
        pending: list[Record] = []
        for number, line in files.numbered_lines(data):
            try:
                record = KINDS[json.loads(line)["kind"]].model_validate_json(line)
            except ValidationError as error:
                raise UsageError(f"cannot read {self.cells}, line {number}: {mistake(error)}") from None
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"cannot read {self.cells}, line {number}: {one_line(error)}") from None
            pending.append(record)
            if isinstance(record, CaseDone):
                cases[record.case] = [r for r in pending if getattr(r, "case", None) == record.case]
                pending = []
        return cases


def _finished_cases(data: bytes) -> int:
    """How many bytes end with the last finished case."""
    end = files.whole_lines(data)
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(data[start:end])["kind"] == "case":
                break
        end = start
    return end
