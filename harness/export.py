"""A recorded run in another tool's format."""

from __future__ import annotations

import json
import sys
from typing import Any

from harness.errors import NothingRan
from harness.records import Cell, Run
from harness.stored import read
from harness.writing import write


def export(run: str, output: str | None) -> int:
    """As pytest-benchmark saves its sessions: `pytest-benchmark compare` reads it. `output`: a file, - for
    stdout; by default benchmark.json in the run's folder. Raises UsageError, or NothingRan without a time."""
    stored = read(run)
    cells = [cell for cell in stored.cells.values() if cell.samples.seconds]
    if not cells:
        raise NothingRan(f"{stored.folder} holds no time")
    text = json.dumps(session(stored.run, cells), indent=4) + "\n"
    target = output or str(stored.folder / "benchmark.json")
    write(target, text)
    if target != "-":
        print(f"wrote {target}", file=sys.stderr)
    return 0


def session(run: Run, cells: list[Cell]) -> dict[str, Any]:
    """The object of pytest-benchmark 5: rounds are the run's, seconds per call."""
    import pytest_benchmark

    machine = run.provenance.get("machine", {})
    git = run.provenance.get("git", {})
    return {
        "machine_info": machine
        | {"node": machine.get("host", ""), "versions": run.provenance.get("versions", {})},
        "commit_info": {"id": git.get("commit", "unknown"), "dirty": git.get("dirty", False)},
        "benchmarks": [_benchmark(cell) for cell in cells],
        "datetime": run.created,
        "version": pytest_benchmark.__version__,
    }


def _benchmark(cell: Cell) -> dict[str, Any]:
    from pytest_benchmark.stats import Stats

    stats = Stats()
    for seconds in cell.samples.seconds:
        stats.update(seconds)
    hidden = {"samples", "kind", "time_us", "low_us", "high_us"}
    return {
        "group": cell.case,
        "name": f"{cell.name}[{cell.case}]",
        "fullname": f"{cell.op}::{cell.name}[{cell.case}]",
        "params": {
            "op": cell.op,
            "implementation": cell.impl,
            "case": cell.case,
            "arm": cell.arm,
            "launch": cell.launch,
        },
        "param": cell.case,
        "extra_info": cell.model_dump(exclude=hidden),
        "options": {"timer": "device", "warmup": True},
        "stats": stats.as_dict() | {"iterations": 1, "data": cell.samples.seconds},
    }
