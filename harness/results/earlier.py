"""The last recorded run before another of the same op on the same machine, and what changed since."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from harness.files import JsonObject
from harness.paths import RESULTS
from harness.results.comparison import MACHINE, Compared, compared
from harness.results.read import RecordedRun, read

MOST = 200  # runs in results/local that are looked at, the newest by name
TRIES = 8  # earlier runs that are compared until one has the same terms


def changed_since(folder: Path, results: Path = RESULTS) -> tuple[RecordedRun, Compared] | None:
    """The newest earlier run that can be compared with the one in the folder, and the comparison. None where
    there is no such run. Of other runs only run.json is read."""
    now = read(str(folder))
    for _, earlier in sorted(_earlier(now, results), reverse=True)[:TRIES]:
        with contextlib.suppress(Exception):  # whatever is odd in another run's record, this one is right
            comparison = compared(then := read(str(earlier)), now)
            if not comparison.incompatible and (comparison.lost or any(r.baseline for r in comparison.rows)):
                return then, comparison
    return None


def _earlier(now: RecordedRun, results: Path) -> Iterator[tuple[str, Path]]:
    """When each earlier run of the same op on the same machine began, and its folder."""
    local = sorted((results / "local").glob("*/run.json"), reverse=True)[:MOST]
    committed = (file for file in results.glob("*/*/run.json") if file.parent.parent.name != "local")
    for file in (*local, *committed):
        with contextlib.suppress(Exception):
            told: JsonObject = json.loads(file.read_bytes())
            same = told["op"] == now.run.op and _machine(told["provenance"]) == _machine(now.run.provenance)
            if same and told["created"] < now.run.created and not told.get("race"):
                yield told["created"], file.parent


def _machine(provenance: JsonObject) -> list[object]:
    machine = provenance["machine"]
    return [machine.get("uuid") or machine.get("host"), *map(machine.get, MACHINE)]
