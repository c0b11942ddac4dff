"""Export of a recorded run to other tools' formats: JSON, CSV, pytest-benchmark."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from harness.errors import NothingRan
from harness.files import JsonObject, write
from harness.results.recorded import read
from harness.results.schema import KEYS, Cell, Record, Run, Verdict


def export(run: str, output: str | None) -> int:
    """As pytest-benchmark saves its sessions: `pytest-benchmark compare` reads it. `output`: a file, - for
    stdout; by default benchmark.json in the run's folder. Raises UsageError, or NothingRan without a time."""
    recorded = read(run)
    cells = [cell for cell in recorded.cells.values() if cell.samples.seconds]
    if not cells:
        raise NothingRan(f"{recorded.folder} holds no time")
    text = json.dumps(session(recorded.run, cells), indent=4) + "\n"
    target = output or str(recorded.folder / "benchmark.json")
    write(target, text)
    if target != "-":
        print(f"wrote {target}", file=sys.stderr)
    return 0


def session(run: Run, cells: list[Cell]) -> JsonObject:
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


RECORDED = "; the run itself is recorded"


def write_outputs(json_to: str | None, csv_to: str | None, settings: Run, records: Sequence[Record]) -> None:
    """`-` is stdout. Raises UsageError where one cannot be written."""
    cells = [r.model_dump(exclude={"kind"}) for r in records if isinstance(r, Cell)]
    if json_to:
        verdicts = [r.model_dump(exclude={"kind"}) for r in records if isinstance(r, Verdict)]
        whole = {"run": settings.model_dump(), "cells": cells, "verdicts": verdicts}
        write(json_to, json.dumps(whole, indent=1, allow_nan=False) + "\n", RECORDED)
    if csv_to:
        import pandas

        columns = [KEYS.get(n, n) for n in Cell.model_fields if n not in ("kind", "samples")]
        write(csv_to, pandas.DataFrame(cells, columns=columns).to_csv(index=False), RECORDED)
