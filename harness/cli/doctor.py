"""`python -m harness doctor`: this machine, its libraries, noise and ceilings, and how to improve them."""

from __future__ import annotations

import click

from harness.cli.options import json_option, target_device


@click.command()
@json_option("Write JSON there instead of text.")
@target_device
@click.option("--quick", is_flag=True, help="Measure nothing (measuring takes about half a minute).")
def doctor(json_to: str | None, device: str | None, quick: bool) -> None:
    """Platform, device, libraries, ceilings, noise, clocks, and what would improve them."""
    import contextlib
    import json

    from harness.doctor.examine import examine
    from harness.errors import NothingRan
    from harness.files import write
    from harness.machine.device import choose_device
    from harness.machine.monitor import monitor_for
    from harness.report.doctor_text import doctor_text
    from harness.run.device_lock import device_lock
    from harness.workers.process import worker_pids

    platform = choose_device(device)
    complaints: list[str] = []
    with contextlib.ExitStack() as lock:
        if not quick:
            try:
                lock.enter_context(device_lock(platform))
            except NothingRan as busy:  # a device that a run is measuring is left alone
                quick, complaints = True, [str(busy)]
        monitor = monitor_for(platform, worker_pids)
        complaints += [*filter(None, [monitor.blocked()]), *monitor.before()]
        facts = examine(platform, monitor.readable(), complaints, quick, monitor)
    if json_to:
        write(json_to, json.dumps(facts, indent=1, allow_nan=False) + "\n")
    else:
        print(doctor_text(facts))
