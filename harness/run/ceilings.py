"""Ceilings of a device: the highest rates that it was measured to reach. They are stored, and results are
given in percent of them. Rates beyond the datasheet are taken to be impossible."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from harness import files
from harness.catalogue.devices import Ceilings, last_level, peaks
from harness.machine.device import driver
from harness.machine.monitor.base import Monitor
from harness.paths import cache
from harness.workers.child import METER
from harness.workers.environment import thread_environment
from harness.workers.process import WorkerFailure, WorkerProcess
from kernels.platform import Platform, version

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Huge pages, where Linux gives them on request: a CPU reads 2 to 7 % faster (seen on Zen 4, 256 MiB)."""

OVER_DATASHEET = 1.1
"""A chip may clock higher than its datasheet assumes: an H100 at 1980 instead of 1830 MHz, 8 %."""


def ceilings(platform: Platform, threads: int, monitor: Monitor) -> Ceilings:
    """The stored ceilings of this device, driver, number of threads and torch. They are measured where none
    are stored, or only disturbed ones. Raises WorkerFailure where they cannot be measured."""
    known = stored(platform, threads)
    return known if known and not known.disturbed else measured(platform, threads, monitor)


def stored(platform: Platform, threads: int) -> Ceilings | None:
    return _read().get(_key(platform, threads))


def measured(platform: Platform, threads: int, monitor: Monitor) -> Ceilings:
    """Measures the ceilings in a worker. Stores and returns the highest that are known, because a disturbance
    can only lower them. Raises WorkerFailure where they cannot be measured or are `impossible`."""
    with meters(platform, threads, 1, HUGE_PAGES) as (meter,):
        monitor.begin()
        facts = meter.ask("measure", 300)
        disturbed = monitor.end()
    now = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    new = Ceilings(**facts, measured=now, disturbed=disturbed)
    if problem := impossible(new, peaks(platform)):
        raise WorkerFailure("error", problem)
    return keep(platform, threads, new)


def impossible(new: Ceilings, peak: Ceilings | None) -> str:
    """What was measured beyond the datasheet's peak, so that no time can be trusted; empty if nothing was."""
    if peak is None:
        return ""
    rates = [(f"{dtype} products", rate, peak.rates[dtype]) for dtype, rate in new.rates.items()]
    rates += [("reads", new.read, peak.read), ("copies", new.copy, peak.read)]
    beyond = [
        f"{what} at {rate / 1e12:.4g} T/s where the data sheet has {peak_rate / 1e12:.4g}"
        for what, rate, peak_rate in rates
        if rate > OVER_DATASHEET * peak_rate
    ]
    return f"impossible: {', '.join(beyond)}: this device's events or its sleep are broken" if beyond else ""


def keep(platform: Platform, threads: int, new: Ceilings) -> Ceilings:
    """Stores, if the disk can be written, and returns the higher rates of these and of the stored ones."""
    key = _key(platform, threads)
    by_key = _read()
    by_key[key] = new.or_better(by_key.get(key))
    content = {key: asdict(ceilings) for key, ceilings in by_key.items()}
    with contextlib.suppress(OSError):
        files.replace(_store(), json.dumps(content, indent=1))
    return by_key[key]


@contextlib.contextmanager
def meters(
    platform: Platform, threads: int, count: int, variables: Mapping[str, str] | None = None
) -> Iterator[list[WorkerProcess]]:
    """`count` workers that are ready to measure this device (see child/meter.py), in these environment
    variables. They end with the context. Raises WorkerFailure."""
    environment = thread_environment(platform, threads) | dict(variables or {})
    level = last_level(platform, stored(platform, threads))
    workers: list[WorkerProcess] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for index in range(count):
            worker = WorkerProcess(METER, environment, folder / f"{index}.log")
            stack.callback(worker.kill)
            worker.hello(platform, threads, 120)
            worker.ask("open", 120, arch=platform.arch, memory=platform.memory, last_level=level)
            workers.append(worker)
        yield workers


def _store() -> Path:
    return cache() / "ceilings" / "ceilings.json"


def _key(platform: Platform, threads: int) -> str:
    """The key of a device's ceilings."""
    device: list[str | int] = [platform.name, platform.arch, platform.device, driver(platform)]
    if platform.kind != "cpu":  # the name of a slice of a GPU may not say how large the slice is
        device.append(platform.memory >> 30)
    return json.dumps([*device, threads, version("torch")])


def _read() -> dict[str, Ceilings]:
    """The stored ceilings by key; none where they cannot be read or have another version's form."""
    try:
        return {key: Ceilings(**facts) for key, facts in json.loads(_store().read_bytes()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
