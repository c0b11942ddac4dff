"""Ceilings of a device: the highest rates that it reaches, measured and stored, for percentages. Rates beyond
the datasheet are taken to be impossible."""

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
"""Huge pages, where Linux gives them on request: with them a CPU reads 2 to 7 % faster (seen on Zen 4, 256
MiB)."""

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
    """Measures the ceilings in a worker, and stores and returns the highest that are known: a disturbance
    can only lower them. Raises WorkerFailure, also where they are beyond the datasheet: no time of such a
    device can be trusted."""
    with meters(platform, threads, 1, HUGE_PAGES) as (meter,):
        monitor.begin()
        facts = meter.ask("measure", 300)
        disturbed = monitor.end()
    now = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    found = Ceilings(**facts, measured=now, disturbed=disturbed)
    if problem := impossible(found, peaks(platform)):
        raise WorkerFailure("error", problem)
    return keep(platform, threads, found)


def impossible(found: Ceilings, peak: Ceilings | None) -> str:
    """What was measured beyond the datasheet, in words; empty if nothing was."""
    if peak is None:
        return ""
    rates = {f"{dtype} products": (rate, peak.rates[dtype]) for dtype, rate in found.rates.items()}
    rates |= {"reads": (found.read, peak.read), "copies": (found.copy, peak.read)}
    beyond = [
        f"{what} at {rate / 1e12:.4g} T/s where the data sheet has {most / 1e12:.4g}"
        for what, (rate, most) in rates.items()
        if rate > OVER_DATASHEET * most
    ]
    return f"impossible: {', '.join(beyond)}: this device's events or its sleep are broken" if beyond else ""


def keep(platform: Platform, threads: int, new: Ceilings) -> Ceilings:
    """Stores and returns the higher rates of these and of the stored ones. Where they cannot be stored, they
    will be measured again."""
    key, known = _key(platform, threads), _read()
    best = new.or_better(known.get(key))
    content = {name: asdict(each) for name, each in (known | {key: best}).items()}
    with contextlib.suppress(OSError):
        files.replace(_store(), json.dumps(content, indent=1))
    return best


@contextlib.contextmanager
def meters(
    platform: Platform, threads: int, count: int, variables: Mapping[str, str] | None = None
) -> Iterator[list[WorkerProcess]]:
    """So many workers that are ready to measure this device (see child/meter.py); they end with the
    context. Raises WorkerFailure."""
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
    """The key of a device's ceilings. Of a GPU it has the memory too, because the name of a part of a
    device may not say which part it is."""
    memory = [] if platform.kind == "cpu" else [platform.memory >> 30]
    device = (platform.name, platform.arch, platform.device, driver(platform))
    return json.dumps([*device, *memory, threads, version("torch")])


def _read() -> dict[str, Ceilings]:
    """The stored ceilings by key; none where they cannot be read or have another version's form."""
    try:
        return {key: Ceilings(**facts) for key, facts in json.loads(_store().read_bytes()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
