"""Ceilings of a device, the rates that it reaches at best: measured here for percentages, looked up in
datasheets for what is impossible."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path

from harness import files
from harness.catalogue.devices import Ceilings, last_level, peaks
from harness.machine.monitor.base import Monitor
from harness.machine.provenance import driver
from harness.paths import cache
from harness.workers.child import METER
from harness.workers.environment import thread_environment
from harness.workers.process import WorkerFailure, WorkerProcess
from kernels.op import DTYPES
from kernels.platform import Platform, version

# Where the kernel gives them on request, a CPU reads 2 to 7 % faster (seen on Zen 4, 256 MiB).
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

# A chip may clock above what its data sheet supposes: an H100 at 1980 rather than 1830 MHz, 8 %.
OVER_DATASHEET = 1.1


def ceilings(platform: Platform, threads: int, monitor: Monitor) -> Ceilings:
    """The stored ones of this device, driver, threads and torch; measured where there are none, or none of a
    quiet machine. Raises WorkerFailure where they cannot be measured."""
    known = stored(platform, threads)
    return known if known and not known.disturbed else measured(platform, threads, monitor)


def stored(platform: Platform, threads: int) -> Ceilings | None:
    return _read(_store()).get(_key(platform, threads))


def measured(platform: Platform, threads: int, monitor: Monitor) -> Ceilings:
    """Measures them in a worker, and stores what is now known: the best so far, for a disturbance only ever
    lowers them. Raises WorkerFailure, also where they are beyond the data sheet: nothing that such a timer
    says can be trusted."""
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
    """What was measured beyond the data sheet, or an empty string."""
    if peak is None:
        return ""
    measured = {f"{dtype} products": (rate, peak.rates[dtype]) for dtype, rate in found.rates.items()}
    measured |= {"reads": (found.read, peak.read), "copies": (found.copy, peak.read)}
    beyond = [
        f"{what} at {rate / 1e12:.4g} T/s where the data sheet has {most / 1e12:.4g}"
        for what, (rate, most) in measured.items()
        if rate > OVER_DATASHEET * most
    ]
    return f"impossible: {', '.join(beyond)}: this device's events or its sleep are broken" if beyond else ""


def keep(platform: Platform, threads: int, new: Ceilings) -> Ceilings:
    """Stores what is higher of these and of those known; gives that."""
    store, key = _store(), _key(platform, threads)
    known = _read(store)
    known[key] = new.or_better(known.get(key))
    _write(store, known)
    return known[key]


@contextlib.contextmanager
def meters(
    platform: Platform, threads: int, count: int, variables: Mapping[str, str] | None = None
) -> Iterator[list[WorkerProcess]]:
    """Workers that are ready to measure this device (see meter.py); gone afterwards. Raises WorkerFailure."""
    environment = thread_environment(platform, threads) | dict(variables or {})
    workers: list[WorkerProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for index in range(count):
                workers.append(WorkerProcess(METER, environment, Path(folder) / f"{index}.log"))
                workers[-1].ask(
                    "open",
                    120,
                    kind=platform.kind,
                    arch=platform.arch,
                    device=platform.device,
                    memory=platform.memory,
                    last_level=last_level(platform, stored(platform, threads)),
                    threads=threads,
                    planned=platform.identity,
                )
            yield workers
        finally:
            for worker in workers:
                worker.kill()


def _store() -> Path:
    return cache() / "ceilings" / "ceilings.json"


def _key(platform: Platform, threads: int) -> str:
    """Of a GPU its memory too, for a part of a device whose name does not say which."""
    memory = [] if platform.kind == "cpu" else [platform.memory >> 30]
    device = (platform.name, platform.arch, platform.device, driver(platform))
    return json.dumps([*device, *memory, threads, version("torch")])


def _read(store: Path) -> dict[str, Ceilings]:
    """What is known; what another version stored in another form, or broke, is not."""
    names = {field.name for field in fields(Ceilings)}
    try:
        entries = json.loads(store.read_text()).items()
        whole = {key: Ceilings(**facts) for key, facts in entries if set(facts) == names}
        return {key: each for key, each in whole.items() if each.rates and {*each.rates} <= {*DTYPES}}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(store: Path, known: Mapping[str, Ceilings]) -> None:
    """Keeping it is a convenience: where it cannot be kept it is measured again."""
    with contextlib.suppress(OSError):
        files.replace(store, json.dumps({key: asdict(each) for key, each in known.items()}, indent=1))
