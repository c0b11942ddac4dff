"""How fast a device can be at best: measured here for percentages, looked up in datasheets for what is
impossible."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from harness import durable
from harness.paths import DATA, cache
from harness.provenance import driver
from harness.threads import thread_environment
from harness.workers import Worker
from kernels.op import DTYPES, Work
from kernels.platform import Platform, version

DATASHEETS = DATA / "devices.json"

# Where the kernel gives them on request, a CPU reads 2 to 7 % faster (seen on Zen 4, 256 MiB).
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True)
class Ceilings:
    """The best that was seen, each per second.

    rates:    floating-point operations of matrix products, by the dtype of their operands
    read:     bytes read
    copy:     bytes read plus bytes written; 0 if unknown
    measured: when
    """

    rates: Mapping[str, float]
    read: float
    copy: float = 0.0
    measured: str = ""

    @staticmethod
    def recorded(facts: Mapping[str, Any]) -> Ceilings | None:
        """As a run recorded them, if it did. Older runs have one rate, of bf16 products, and what was
        read: going on with such a run keeps the yardstick of its first rows."""
        if "flops" in facts:
            return Ceilings({"bf16": facts["flops"]}, facts["bytes"], measured=facts["measured"])
        return Ceilings(**facts) if facts else None

    def rate(self, dtype: str) -> float:
        """Of products whose operands are `dtype` by the op's definition: the best of that and of any wider
        dtype, which holds the same values. Where none of these was measured, the best of all."""
        wide = DTYPES[DTYPES.index(dtype) :]
        return max([self.rates[d] for d in wide if d in self.rates] or self.rates.values())

    @property
    def bandwidth(self) -> float:
        """Bytes per second. Ops read far more than they write, so reading is what bounds them; where a copy
        moves more, some mix of reads and writes is faster than reads alone, and an op may be that mix."""
        return max(self.read, self.copy)

    def least_time(self, work: Work) -> float:
        """Seconds below which the work cannot be done, all its bytes coming from memory."""
        return max(work.flops / self.rate(work.dtype), work.bytes / self.bandwidth)

    def or_better(self, other: Ceilings | None) -> Ceilings:
        """Whatever is higher of either; of the time of this one."""
        if other is None:
            return self
        rates = {
            dtype: max(self.rates.get(dtype, 0.0), other.rates.get(dtype, 0.0))
            for dtype in DTYPES
            if dtype in self.rates or dtype in other.rates
        }
        return Ceilings(rates, max(self.read, other.read), max(self.copy, other.copy), self.measured)


def datasheets(platform: Platform) -> list[dict[str, Any]]:
    """The entries that this device may be: those of its architecture with a word of its name, or all of its
    architecture, as ROCm's kernel driver names no product."""
    entries = [d for d in json.loads(DATASHEETS.read_text())["devices"] if d["arch"] == platform.arch]
    named = [d for d in entries if re.search(rf"\b{d['name']}\b", platform.name)]
    return named or entries


def peaks(platform: Platform) -> Ceilings | None:
    """The highest of the datasheets' peaks, that of FP8 for products of any dtype: nothing right is ever
    beyond them. None for CPUs: how many memory channels a machine has is not known from within, nor
    how high it may clock."""
    entries = datasheets(platform)
    if not entries:
        return None
    highest = max(rate for entry in entries for rate in entry["tflops"].values())
    return Ceilings(dict.fromkeys(DTYPES, highest * 1e12), max(entry["tbps"] for entry in entries) * 1e12)


def last_level(platform: Platform) -> int:
    """Bytes of the last-level cache by the system or the datasheet, 0 if neither knows. Not what torch
    reports: on AMD that is the L2, before the last level."""
    return max([platform.last_level, *(entry["last_level_mb"] << 20 for entry in datasheets(platform))])


def ceilings(platform: Platform, threads: int) -> Ceilings:
    """The stored ones of this device, driver, threads and torch; measured where there are none.
    Raises WorkerFailure where they cannot be measured."""
    return stored(platform, threads) or measured(platform, threads)


def stored(platform: Platform, threads: int) -> Ceilings | None:
    return _read(_store()).get(_key(platform, threads))


def measured(platform: Platform, threads: int) -> Ceilings:
    """Measures them in a worker, and stores what is now known: the best so far, for a disturbance only ever
    lowers them. Raises WorkerFailure."""
    with meters(platform, threads, 1, HUGE_PAGES) as (meter,):
        facts = meter.ask("measure", 300)
    now = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    return keep(platform, threads, Ceilings(**facts, measured=now))


def keep(platform: Platform, threads: int, found: Ceilings) -> Ceilings:
    """Stores what is higher of these and of those known; gives that."""
    store, key = _store(), _key(platform, threads)
    known = _read(store)
    known[key] = found.or_better(known.get(key))
    _write(store, known)
    return known[key]


@contextlib.contextmanager
def meters(
    platform: Platform, threads: int, count: int, variables: Mapping[str, str] | None = None
) -> Iterator[list[Worker]]:
    """Workers that are ready to measure this device (see meter.py); gone afterwards. Raises WorkerFailure."""
    environment = thread_environment(platform, threads) | dict(variables or {})
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for index in range(count):
                workers.append(Worker("meter", environment, Path(folder) / f"{index}.log"))
                workers[-1].ask(
                    "open",
                    120,
                    kind=platform.kind,
                    arch=platform.arch,
                    device=platform.device,
                    memory=platform.memory,
                    last_level=last_level(platform),
                    threads=threads,
                )
            yield workers
        finally:
            for worker in workers:
                worker.kill()


def _store() -> Path:
    return cache() / "ceilings" / "ceilings.json"


def _key(platform: Platform, threads: int) -> str:
    device = (platform.name, platform.arch, platform.device, driver(platform))
    return json.dumps([*device, threads, version("torch")])


def _read(store: Path) -> dict[str, Ceilings]:
    """What is known; what another version stored in another form, or broke, is not."""
    names = {field.name for field in fields(Ceilings)}
    try:
        entries = json.loads(store.read_text()).items()
        whole = {key: Ceilings(**facts) for key, facts in entries if set(facts) == names}
        return {key: found for key, found in whole.items() if found.rates and {*found.rates} <= {*DTYPES}}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(store: Path, known: Mapping[str, Ceilings]) -> None:
    """Keeping it is a convenience: where it cannot be kept it is measured again."""
    with contextlib.suppress(OSError):
        durable.replace(store, json.dumps({key: asdict(found) for key, found in known.items()}, indent=1))
