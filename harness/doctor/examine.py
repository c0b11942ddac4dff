"""Facts about a machine: what it is, what it can tell apart, and what would improve that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import kernels
from harness.catalogue.devices import datasheets, last_level
from harness.doctor import noise
from harness.doctor.advice import advice
from harness.files import JsonObject
from harness.machine.device import torch_advice
from harness.machine.monitor import Blind, Monitor
from harness.machine.provenance import LIBRARIES
from harness.run.ceilings import measured, meters, stored
from harness.statistics.paired import noise_of
from harness.workers.environment import provenance, worker_threads
from harness.workers.process import WorkerFailure
from kernels.platform import Platform, devices, lookalike, version

if TYPE_CHECKING:
    from harness.results.facts import Facts


def examine(
    here: Platform,
    conditions: Mapping[str, str] | None = None,
    complaints: Sequence[str] = (),
    quick: bool = False,
    monitor: Monitor | None = None,
) -> Facts:
    """What there is to say of a machine, which `monitor` watches meanwhile.

    conditions: clocks and the like, as the driver gives them now
    complaints: what is wrong with them
    quick:      measures nothing; ceilings are those of an earlier time, if there are any
    """
    threads = worker_threads()
    machine = provenance(here, threads)["machine"] | {"last_level_cache": last_level(here)}
    # Before our own work disturbs what they look at.
    improve = [*filter(None, [torch_advice(here)]), *complaints, *advice(here, threads)]
    runs = [i for op in kernels.OPS for i in kernels.implementations(op) if i.available(here).ok]
    return {
        "machine": {name: value for name, value in machine.items() if value not in ("", 0)},
        "devices": {device: f"{p.kind} {p.arch} {p.name}" for device, p in devices().items()},
        "libraries": {name: version(name) or lookalike(name) or "not installed" for name in LIBRARIES},
        "ceilings": _ceilings(here, threads, quick, monitor or Blind("not watched")),
        "datasheet": datasheets(here),
        "instruments": {} if quick else _instruments(here, threads),
        "conditions": dict(conditions or {}),
        "runs here": {f"{i.op} {i.name}": "checked only" if i.interpreted(here) else "timed" for i in runs},
        "what would improve it": improve,
    }


def _ceilings(here: Platform, threads: int, quick: bool, monitor: Monitor) -> JsonObject:
    """Those of `harness.run.ceilings`, measured again: the best so far."""
    try:
        ceilings = stored(here, threads) if quick else measured(here, threads, monitor)
    except WorkerFailure as failure:
        return {"problem": failure.reason}
    return asdict(ceilings) if ceilings else {}


def _instruments(here: Platform, threads: int) -> JsonObject:
    """The clock's steps, and how far equal things differ; null for what is infinite: a noise where the pair
    says only that the machine was disturbed."""
    try:
        with meters(here, threads, 2) as pair:
            clock, pairs = noise.clock(pair[0]), noise.clock_differences(pair)
    except WorkerFailure as failure:
        return {"problem": failure.reason}
    return {"clock": clock} | {
        workload: {
            name: value if math.isfinite(value) else None
            for name, value in (
                ("ratio", seen.ratio),
                ("low", seen.low),
                ("high", seen.high),
                ("floor", noise_of(seen)),
            )
        }
        for workload, seen in pairs.items()
    }
