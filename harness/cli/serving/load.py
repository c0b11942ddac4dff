"""`python -m harness serving load FILE...`: any client's results in one schema."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness.cli.options import json_option, write_json
from harness.errors import FAILED, OK, USAGE, UsageError
from harness.files import require_writable, write


@click.command("load")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@json_option("Write JSON there instead of a table.")
@click.option("--csv", "csv_to", metavar="FILE|-", help="Write one line for each metric there.")
def load(files: tuple[str, ...], json_to: str | None, csv_to: str | None) -> None:
    """Read the results of serving clients, and check them. Every run is held to what must be true between its
    numbers. Latencies that were not measured are left out. Exit code 1: a number is wrong; 2: a file cannot
    be read."""
    from harness.cli.serving.load_display import as_csv, runs_table
    from harness.errors import UnreadableError
    from harness.report.terminal import show
    from harness.serving.clients.load import beside_each_other, load_each

    require_writable(json_to, csv_to)
    inputs = {Path(name).resolve() for name in files}
    for target in filter(None, (json_to, csv_to)):
        if Path(target).resolve() in inputs:
            raise UsageError(f"cannot write {target}: it is one of the files to read")
    runs, unreadable = [], []
    for name in files:
        try:
            runs += load_each(name)
        except UnreadableError as error:
            unreadable.append(" ".join(str(error).split()))
            click.echo(f"error: {unreadable[-1]}", err=True)
    runs = beside_each_other(runs)
    if json_to:
        facts = {"runs": [run.model_dump() for run in runs], "unreadable": unreadable}
        write_json(json_to, facts, allow_nan=False)
    if csv_to:
        write(csv_to, as_csv(runs))
    if not (json_to or csv_to) and runs:
        show(runs_table(runs, len(files), len(unreadable)), sys.stdout)
    if unreadable:
        sys.exit(USAGE)
    sys.exit(FAILED if any(finding.severity == "wrong" for run in runs for finding in run.findings) else OK)
