"""`python -m harness serving replay`."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.errors import FAILED, OK, NothingRan
from harness.files import require_writable, write
from harness.machine.device import choose_device
from harness.run.device import own_device
from harness.serving.replay.replay import replay
from harness.serving.replay.report import keep, table
from harness.serving.replay.request import ReplayRequest


def show(request: ReplayRequest, out: str | None = None, json_to: str | None = None) -> int:
    """Replays one step for each batch size and prints what each swap changes."""
    require_writable(json_to, None)
    platform = choose_device(request.device)
    plans, replays = list(request.plans(platform)), []
    with own_device(platform) as own:
        for line in own.busy:
            print(f"note: {line}", file=sys.stderr)
        for name, plan, notes in plans:
            measured = replay(plan, platform, own.monitor)
            measured = measured.model_copy(update={"notes": (*notes, *measured.notes)})
            replays.append(measured)
            print("\n" + table(measured), file=sys.stderr if json_to == "-" else sys.stdout, flush=True)
            if out:
                keep(measured, Path(out), name)
    if json_to:
        write(json_to, "[" + ",\n".join(r.model_dump_json(indent=1) for r in replays) + "]\n")
    if unmeasured := next((r for r in replays if not r.rounds), None):
        raise NothingRan(
            f"no round counted ({unmeasured.stopped}), {unmeasured.disturbed} were disturbed: give a "
            "longer --budget, or quiet the machine"
        )
    return FAILED if any(arm.failed for r in replays for arm in r.arms.values()) else OK
