"""`python -m harness serving trace FILE`."""

from __future__ import annotations

import json

from harness.errors import FAILED, OK, UsageError
from harness.files import write
from harness.serving.trace import decompose
from harness.serving.trace.classify import Phase
from harness.serving.trace.report import as_json, as_text


def show(
    file: str, phase: Phase | None, each_step: bool, top: int, partial: bool, json_to: str | None
) -> int:
    """Prints the trace taken apart, or writes it as JSON. Returns the exit code; raises UsageError."""
    trace = decompose(file, partial=partial)
    if phase and phase not in trace.phases():
        raise UsageError(f"{file} has no {phase} steps; it has: {', '.join(trace.phases())}")
    if json_to:
        write(json_to, json.dumps(as_json(trace, phase), indent=1, allow_nan=False) + "\n")
    else:
        print(as_text(trace, phase, top, each_step), end="")
    return FAILED if any(finding.severity == "wrong" for finding in trace.findings) else OK
