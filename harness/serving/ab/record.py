"""Record of an A/B: a folder with `ab.json` (the plan, what was predicted) and `journal.jsonl` (a line an event).

An event is on the disk before the next begins: a kill at any moment loses no finished pair, and a launch that
was not finished is known by its line.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.errors import UsageError, mistake
from harness.files import JsonLines, JsonObject, replace, require_writable_folder
from harness.paths import RESULTS
from harness.serving.ab.plan import Plan
from harness.serving.ledger.prediction import Prediction

PLAN, JOURNAL = "ab.json", "journal.jsonl"


class Record:
    """events: of the journal, in their order, each with `event` and `at`.

    lock: a descriptor with the folder's lock, which guards inherit: it is free when no server is left
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, -1
        self._journal = JsonLines(folder / JOURNAL, _event)
        self.events = list(self._journal.records()) if (folder / JOURNAL).exists() else []
        try:
            head = json.loads((folder / PLAN).read_text())
            self.plan = Plan.model_validate(head["plan"])
            self.about: JsonObject = head
            self.predictions = [Prediction.model_validate(entry) for entry in head["predictions"]]
        except ValidationError as error:
            raise UsageError(f"cannot read {folder / PLAN}: {mistake(error)}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{folder} is no record of `serving ab`: {PLAN}: {error}") from None

    @classmethod
    def begin(cls, folder: Path, plan: Plan, more: Mapping[str, Any]) -> Record:
        """Raises UsageError where the folder holds one already or cannot be written.

        more: what else is known before the first launch
        """
        require_writable_folder(folder, "; choose another --out")
        if (folder / PLAN).exists():
            raise UsageError(
                f"{folder} holds an A/B already: --resume {folder} goes on, or choose another --out"
            )
        head = {"schema": 1, "created": now(), "plan": plan.model_dump(), **more}
        replace(folder / PLAN, json.dumps(head, indent=1) + "\n")
        return cls(folder)

    def require_plan(self, plan: Plan) -> None:
        """Raises UsageError where another one was begun: launches of two plans are no pairs."""
        before, after = self.plan.model_dump(), plan.model_dump()
        for key, value in after.items():
            if before[key] != value:
                was, now_ = (json.dumps(each)[:80] for each in (before[key], value))
                raise UsageError(f"{self.folder} was begun with another {key}: {was}, now {now_}")

    def hold(self, say: Callable[[str], None]) -> None:
        """Takes the folder's lock. Waits where servers of a run that was killed are still being ended; raises
        UsageError where another process goes on with this record."""
        self.lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self.lock, 20, 0).decode()
            if owner.isdecimal() and Path(f"/proc/{owner}").exists():
                raise UsageError(f"process {owner} goes on with {self.folder} already") from None
            say("waiting for the server of the run that was killed to end")
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, str(os.getpid()).encode(), 0)

    def append(self, event: str, **facts: Any) -> JsonObject:
        """On the disk when this returns. Raises JournalFull."""
        line = {"event": event, "at": now(), **facts}
        self._journal.append(json.dumps(line))
        self.events.append(line)
        return line

    def of(self, event: str, **facts: Any) -> list[JsonObject]:
        """Events of that kind with these facts."""
        return [
            e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in facts.items())
        ]

    def pairs(self) -> dict[int, dict[str, JsonObject]]:
        """Finished pairs: number -> arm -> its measured run. Number 0 is the launches that are thrown away."""
        found: dict[int, dict[str, JsonObject]] = {}
        for done in self.of("pair"):
            runs = self.of("measured", pair=done["pair"], attempt=done["attempt"])
            found[done["pair"]] = {run["arm"]: run for run in runs}
        return found

    def values(self, metric: str, arms: Sequence[str]) -> list[tuple[float, ...]]:
        """Of each finished pair in which all these arms have it."""
        runs = [runs for pair, runs in sorted(self.pairs().items()) if pair]
        rows = [tuple(pair[arm]["metrics"].get(metric) for arm in arms) for pair in runs]
        return [row for row in rows if None not in row]


def default_folder() -> Path:
    return RESULTS / "local" / f"serving-ab-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _event(line: bytes) -> JsonObject:
    event = json.loads(line)
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("no event of an A/B")
    return event
