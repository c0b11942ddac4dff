"""The record of an A/B: a folder with `ab.json` (the plan and the predictions) and `journal.jsonl` (events).

An event is on the disk before the next begins. So a kill at any moment loses no finished pair, and a launch
that was not finished is known by its line.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import UsageError, mistake
from harness.files import JsonLines, JsonObject, replace, require_writable_folder, take_lock
from harness.serving.ab.plan import Plan
from harness.serving.ledger import Prediction

PLAN, JOURNAL = "ab.json", "journal.jsonl"


class Record:
    """The record in a folder.

    about:  the content of ab.json; its `plan`, `names` and `predictions` are attributes of their own, too
    events: of the journal, in their order, each with `event` and `at`
    lock:   a descriptor with the folder's lock. Guards inherit it, so that it is free when no server is left
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, -1
        self._journal = JsonLines(folder / JOURNAL, json.loads)
        try:
            self.about: JsonObject = json.loads((folder / PLAN).read_bytes())
            self.plan = Plan.model_validate(self.about["plan"])
            self.names: list[JsonObject] = self.about["names"]
            self.predictions = [Prediction.model_validate(entry) for entry in self.about["predictions"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = getattr(error, "strerror", None) or mistake(error)
            raise UsageError(f"{folder} is no record of `serving ab`: {PLAN}: {why}") from None
        self.events = list(self._journal.records()) if (folder / JOURNAL).exists() else []

    @classmethod
    def begin(cls, folder: Path, plan: Plan, more: Mapping[str, Any]) -> Record:
        """Begins a record. more: `names` that nothing reads, and `predictions`. Raises UsageError."""
        require_none(folder)
        require_writable_folder(folder, "; choose another --out")
        head = {"schema": 1, "created": _now(), "plan": plan.model_dump(), **more}
        replace(folder / PLAN, json.dumps(head, indent=1) + "\n")
        return cls(folder)

    def require_plan(self, plan: Plan) -> None:
        """Raises UsageError for another plan: launches of two plans make no pairs."""
        for key, now in plan:
            before = getattr(self.plan, key)
            if before != now:
                both = f"{str(before)[:80]}, now {str(now)[:80]}"
                raise UsageError(f"{self.folder} was begun with another {key}: {both}")

    def hold(self, say: Callable[[str], None]) -> None:
        """Takes the folder's lock. The guard of a server that a killed run left has it until that server has
        ended. Raises UsageError if another process goes on with the record."""
        self.lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        owner, _ = take_lock(self.lock)
        if owner:
            if owner.isdecimal() and Path(f"/proc/{owner}").exists():
                raise UsageError(f"process {owner} goes on with {self.folder} already")
            say("waiting for the server of the run that was killed to end")
            take_lock(self.lock, wait=True)

    def append(self, event: str, **facts: Any) -> None:
        """Writes an event, which is on the disk when this returns. Raises JournalFull."""
        line = {"event": event, "at": _now(), **facts}
        self._journal.append(json.dumps(line))
        self.events.append(line)

    def of(self, event: str, **facts: Any) -> list[JsonObject]:
        """The events of that kind that have these facts."""
        facts["event"] = event
        return [line for line in self.events if all(line.get(key) == facts[key] for key in facts)]

    def pairs(self) -> dict[int, dict[str, JsonObject]]:
        """Finished pairs: from number to arm to its measured run. Pair 0 is not counted."""
        pairs = {}
        for done in sorted(self.of("pair"), key=lambda event: event["pair"]):
            runs = self.of("measured", pair=done["pair"], attempt=done["attempt"])
            pairs[done["pair"]] = {run["arm"]: run for run in runs}
        return pairs

    def values(self, metric: str, arms: Sequence[str]) -> list[tuple[float, ...]]:
        """The metric's value of each of these arms, in a tuple for each finished pair. A pair in which a
        client did not report the metric is left out."""
        counted = [runs for pair, runs in self.pairs().items() if pair > 0]
        values = [tuple(runs[arm]["metrics"][metric] for arm in arms) for runs in counted]
        return [of_pair for of_pair in values if None not in of_pair]

    def launch_folder(self, launch: Mapping[str, Any]) -> Path:
        """The folder of a launch. launch: has its pair, attempt and arm, as each event of it does"""
        name = f"{launch['pair']:03d}-{launch['attempt']}-{launch['arm']}"
        return self.folder.absolute() / "launches" / name


def pair_seconds(plan: Plan, record: Record | None) -> float:
    """Seconds that one launch of each arm takes: as measured so far, or as the plan expects."""
    arms = len(plan.arms)
    launches_s = [event["seconds"] for event in record.of("stopped", ok=True)] if record else []
    if len(launches_s) > arms:
        launches_s = launches_s[arms:]  # the first launch of an arm fills caches
    if launches_s:
        return arms * statistics.fmean(launches_s)
    warm_up_runs = 1.0  # the warm-up's length, in runs
    if plan.warm_up_prompts and plan.prompts:
        warm_up_runs = plan.warm_up_prompts / plan.prompts
    return 60 * arms * (plan.launch_minutes + plan.run_minutes * (1 + warm_up_runs))


def require_none(folder: Path) -> None:
    """Raises UsageError if the folder holds the record of an A/B."""
    if (folder / PLAN).exists():
        raise UsageError(f"{folder} holds an A/B: --resume {folder} goes on, or choose another --out")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
