"""The last recorded run before another of the same op on the same machine, and what changed since."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from harness.files import JsonObject
from harness.paths import RESULTS
from harness.results.comparison import MACHINE, RunComparison, compare_runs
from harness.results.read import RecordedRun, read

MAX_LOCAL_RUNS = 200  # runs in results/local that are looked at: the last by name, which begins with a date
MAX_COMPARED = 8  # earlier runs that are read, the newest first, until one can be compared


def changed_since(folder: Path, results: Path = RESULTS) -> tuple[RecordedRun, RunComparison] | None:
    """The newest earlier run that can be compared with the one in the folder, and the comparison. None where
    there is no such run. At most MAX_COMPARED earlier runs are read whole; of the others only run.json."""
    now = read(str(folder))
    for _, earlier_folder in sorted(_earlier_runs(now, results), reverse=True)[:MAX_COMPARED]:
        with contextlib.suppress(Exception):  # a broken record of another run is no error of this one
            earlier = read(str(earlier_folder))
            comparison = compare_runs(earlier, now)
            says_something = comparison.lost or any(row.baseline for row in comparison.rows)
            if says_something and not comparison.incompatible:
                return earlier, comparison
    return None


def _earlier_runs(now: RecordedRun, results: Path) -> Iterator[tuple[str, Path]]:
    """Yields the beginning and the folder of each earlier run of the op on this machine, without races."""
    local = sorted((results / "local").glob("*/run.json"), reverse=True)[:MAX_LOCAL_RUNS]
    committed = (file for file in results.glob("*/*/run.json") if file.parent.parent.name != "local")
    for file in (*local, *committed):
        with contextlib.suppress(Exception):
            run: JsonObject = json.loads(file.read_bytes())
            same_machine = _machine(run["provenance"]) == _machine(now.run.provenance)
            is_earlier = run["created"] < now.run.created
            if run["op"] == now.run.op and same_machine and is_earlier and not run.get("race"):
                yield run["created"], file.parent


def _machine(provenance: JsonObject) -> list[object]:
    """What identifies a machine: its GPU or, without one, its host; and the facts that must be equal."""
    machine = provenance["machine"]
    return [machine.get("uuid") or machine.get("host"), *map(machine.get, MACHINE)]
