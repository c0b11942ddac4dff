"""`python -m harness doctor`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from harness.doctor.examine import examine
from harness.errors import NothingRan, UsageError
from harness.machine.device import choose_device
from harness.machine.monitor import monitor_for
from harness.report.doctor_text import text
from harness.workers.process import worker_pids


def show(json_to: str | None = None, device: str | None = None, quick: bool = False) -> None:
    """Prints the findings, as text or JSON. Measures nothing on a device that a run is measuring."""
    here = choose_device(device)
    complaints: list[str] = []
    with contextlib.ExitStack() as held:
        if not quick:
            from harness.run.device_lock import (
                device_lock,  # loads what reads records, which --quick does without
            )

            try:
                held.enter_context(device_lock(here))
            except NothingRan as busy:
                quick, complaints = True, [str(busy)]
        monitor = monitor_for(here, worker_pids)
        complaints += [*filter(None, [monitor.blocked()]), *monitor.before()]
        facts = examine(here, monitor.readable(), complaints, quick)
    if json_to is None:
        print(text(facts))
        return
    whole = json.dumps(facts, indent=1, allow_nan=False) + "\n"
    if json_to == "-":
        sys.stdout.write(whole)
        return
    try:
        Path(json_to).write_text(whole)
    except OSError as error:
        raise UsageError(f"cannot write {json_to}: {error.strerror}") from None
