"""Journal of live runs: a line of JSON for each, on the disk before the next thing begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import files
from harness.errors import UsageError
from harness.serving.live.swaps import current_names

FILE = "live.jsonl"


class LiveJournal:
    """live.jsonl of a folder: the plan first, then lines `observed`, `calibration`, `run`, `pair`,
    `given_up` and `resumed`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / FILE
        self._lines = files.JsonLines(self.path, _entry)

    @staticmethod
    def begin(folder: Path, plan: dict[str, Any], resume: bool) -> LiveJournal:
        """The folder's, gone on with, or a new one. Raises UsageError."""
        return LiveJournal.resume(folder, plan) if resume else LiveJournal.create(folder, plan)

    @staticmethod
    def create(folder: Path, plan: dict[str, Any]) -> LiveJournal:
        """Raises UsageError where there is one already, or it cannot be written."""
        journal = LiveJournal(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if journal.path.exists() and any(line["kind"] != "plan" for line in journal.lines()):
                raise UsageError(f"{folder} already holds live runs; choose another --out, or --resume")
            journal.path.write_bytes(b"")
        except OSError as error:
            raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another --out") from None
        journal.append("plan", plan)
        return journal

    @staticmethod
    def resume(folder: Path, plan: dict[str, Any]) -> LiveJournal:
        """Raises UsageError where the folder holds none, or one of another plan."""
        journal = LiveJournal(folder)
        lines = journal.lines()
        if not lines or lines[0]["kind"] != "plan":
            raise UsageError(f"{folder} holds no live runs to resume")
        # More pairs may be asked for than at first, a commit may lie between, and memory that is free is not
        # what a machine is; anything else would mix two experiments.
        before = _lasting(lines[0])
        for key, value in _lasting(json.loads(json.dumps(plan))).items():
            if before.get(key) != value:
                raise UsageError(
                    f"{folder} was begun with another {key}: {_short(before.get(key))}, "
                    f"now {_short(value)}; choose another --out"
                )
        journal.append("resumed", {"git": plan.get("git"), "pairs": plan.get("pairs")})
        return journal

    def append(self, kind: str, facts: dict[str, Any]) -> None:
        """One line, on the disk when this returns. Raises JournalFull."""
        self._lines.append(json.dumps({"kind": kind, **facts}))

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines. Raises UsageError for one that is broken in the middle."""
        return list(self._lines.records())

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["kind"] == kind]


def _entry(line: bytes) -> dict[str, Any]:
    entry = json.loads(line)
    if not isinstance(entry, dict) or "kind" not in entry:
        raise ValueError("no entry of a live run")
    return entry


def _lasting(plan: dict[str, Any]) -> dict[str, Any]:
    machine = {key: plan.get("machine", {}).get(key) for key in ("host", "device", "cpus")}
    arms = [{**arm, "swaps": list(current_names(arm["swaps"]))} for arm in plan.get("arms", ())]
    lasting = {key: value for key, value in plan.items() if key not in ("kind", "pairs", "git")}
    return lasting | {"machine": machine, "arms": arms}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
