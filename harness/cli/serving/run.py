"""`python -m harness serving run`."""

from __future__ import annotations

import json

from harness.cli.serving.progress import progress_to_stderr
from harness.errors import FAILED, NOTHING_RAN, OK
from harness.files import write
from harness.serving.live.ab.summary import summarise, table
from harness.serving.live.run import RunRequest, run_pairs


def run(request: RunRequest, json_to: str | None, quiet: bool) -> int:
    """Makes the runs and prints what they show. 1 where a pair was given up, 3 where none finished."""
    journal = run_pairs(request, progress_to_stderr(quiet))
    summary = summarise(journal.lines(), journal.folder)
    if json_to:
        write(json_to, json.dumps(summary, indent=1) + "\n")
    if not quiet and json_to != "-":
        print(table(summary))
    if not summary["pairs"]:
        return NOTHING_RAN if summary["asked"] else OK
    return FAILED if summary["given_up"] else OK
