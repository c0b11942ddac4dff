"""`python -m harness serving load FILE...`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from harness.errors import FAILED, OK, USAGE
from harness.serving.loading import load
from harness.serving.reading import UnreadableError
from harness.writing import write


def show(files: Sequence[str], json_to: str | None, csv_to: str | None) -> int:
    """Prints the runs; a file that cannot be read costs itself only. Returns the exit code."""
    runs, code = [], OK
    for name in files:
        try:
            runs += load(name)
        except UnreadableError as error:
            click.echo(f"error: {error}", err=True)
            code = USAGE
    if json_to:
        whole = {"runs": [run.model_dump() for run in runs]}
        write(json_to, json.dumps(whole, indent=1, allow_nan=False) + "\n")
    else:
        for run in runs:
            print(run.id, run.client, *(f"{m.name}={m.value:g}{m.unit}" for m in run.metrics[:3]))
    if code == OK and any(one.severity == "wrong" for run in runs for one in run.findings):
        code = FAILED
    return code
