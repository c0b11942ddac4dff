"""`python -m harness export`: a recorded run as pytest-benchmark's JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from harness.files import JsonObject
    from harness.results.schema import Cell, Run


@click.command()
@click.argument("run")
@click.option("-o", "--output", metavar="FILE|-", help="Default: benchmark.json in the run's folder.")
def export(run: str, output: str | None) -> None:
    """A recorded RUN as a file that `pytest-benchmark compare` reads."""
    import json

    from harness.errors import NothingRan
    from harness.files import write
    from harness.results.read import read

    recorded = read(run)
    cells = [cell for cell in recorded.cells.values() if cell.samples.seconds]
    if not cells:
        raise NothingRan(f"{recorded.folder} holds no time")
    target = output or str(recorded.folder / "benchmark.json")
    write(target, json.dumps(session(recorded.run, cells), indent=4) + "\n")
    if target != "-":
        print(f"wrote {target}", file=sys.stderr)


def session(run: Run, cells: list[Cell]) -> JsonObject:
    """The object that pytest-benchmark 5 saves: its rounds are the run's, in seconds per call."""
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


def _benchmark(cell: Cell) -> JsonObject:
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
            "arm": cell.setting,
            "launch": cell.launch,
        },
        "param": cell.case,
        "extra_info": cell.model_dump(exclude=hidden),
        "options": {"timer": "device", "warmup": True},
        "stats": stats.as_dict() | {"iterations": 1, "data": cell.samples.seconds},
    }
