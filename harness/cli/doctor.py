"""`python -m harness doctor`: this machine, its libraries, noise and ceilings, and how to improve them."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path

import click

from harness.cli.options import answer, json_option, target_device
from harness.errors import FAILED, OK, NothingRan


@click.command()
@json_option("Write JSON there instead of text.")
@target_device
@click.option("--quick", is_flag=True, help="Measure nothing; measuring takes about half a minute.")
@click.option("--bind", is_flag=True, help="Say which rows fit their libraries: those installed, or at PATH.")
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=click.Path(path_type=Path))
def doctor(json_to: str | None, device: str | None, quick: bool, bind: bool, paths: tuple[Path, ...]) -> None:
    """Examine this machine and say what would improve it. It shows the platform, the device, libraries,
    measured limits, noise and clocks. With --bind: whether each row's calls fit a version of its library,
    whose files are read and not imported. Rows that break come first, and then the exit status is 1. PATH is
    a wheel, a folder of packages (a site-packages, a checkout), or a file of recorded signatures."""
    if bind:
        sys.exit(show_bindings(paths, json_to))
    if paths:
        raise click.UsageError("PATH goes with --bind")
    from harness.doctor.examine import examine
    from harness.machine.device import choose_device
    from harness.machine.monitor import monitor_for
    from harness.report.doctor_text import doctor_text
    from harness.run.device import device_lock
    from harness.workers.process import worker_pids

    platform = choose_device(device)
    complaints: list[str] = []
    with contextlib.ExitStack() as lock:
        if not quick:
            try:
                lock.enter_context(device_lock(platform))
            except NothingRan as busy:  # a run is measuring the device, and measuring would disturb it
                quick = True
                complaints.append(str(busy))
        monitor = monitor_for(platform, worker_pids)
        blocked = monitor.blocked()
        if blocked:
            complaints.append(blocked)
        complaints += monitor.complaints()
        facts = examine(platform, monitor.current_values(), complaints, quick, monitor)
    answer(json_to, facts, lambda: doctor_text(facts))


def show_bindings(paths: tuple[Path, ...], json_to: str | None) -> int:
    """Prints which rows fit the libraries at the paths, or those installed. Returns the exit code."""
    from harness.doctor.bindings import BREAKS, bindings, installed, releases_in, wanted_libraries
    from harness.report.doctor_text import binding_table

    releases = [release for path in paths for release in releases_in(path)] if paths else installed()
    if not releases:
        where = f"in {', '.join(map(str, paths))}" if paths else "installed"
        raise NothingRan(f"no library of any row is {where}; rows take {', '.join(wanted_libraries())}")
    rows = [asdict(binding) for binding in bindings(releases)]
    if not rows:
        names = ", ".join(f"{release.library} {release.version}" for release in releases)
        raise NothingRan(f"no row takes anything of {names}")
    answer(json_to, {"bindings": rows}, lambda: binding_table(rows))
    return FAILED if any(row["status"] == BREAKS for row in rows) else OK
