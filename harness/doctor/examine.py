"""Facts about a machine: what it is, which differences can be told there, and what would improve that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import kernels
from harness.catalogue.devices import datasheets, last_level
from harness.doctor.advice import advice
from harness.files import JsonObject
from harness.machine.device import torch_advice
from harness.machine.monitor.base import Blind, Monitor
from harness.machine.provenance import LIBRARIES
from harness.run.ceilings import measured, meters, stored
from harness.statistics.intervals import MIN_BLOCKS
from harness.statistics.paired import Comparison, compare, noise_of
from harness.timing.interleaved import measure
from harness.timing.rounds import Policy
from harness.workers.environment import provenance, worker_threads
from harness.workers.process import WorkerFailure, WorkerProcess
from kernels.platform import Platform, devices, lookalike, version

WORKLOADS = ("read", "product")
SAMPLE_S = 0.05
SECONDS = 2.5
"""The seconds of samples for each workload."""


def examine(
    here: Platform,
    conditions: Mapping[str, str] | None = None,
    complaints: Sequence[str] = (),
    quick: bool = False,
    monitor: Monitor | None = None,
) -> JsonObject:
    """Returns the facts about this machine, in SI units, as `doctor --json` writes them: `machine`, without
    what is not known; `devices`, a description of each; `libraries`, their versions; `ceilings` and
    `instruments`, with `problem` alone where they could not be measured; `datasheet`; `conditions`;
    `runs here`, `timed` or `checked only` by op and implementation; `what would improve it`.

    conditions: clocks and the like, as the driver gives them now
    complaints: what is wrong with them
    quick:      measure nothing, and give the ceilings of an earlier time if there are any
    monitor:    watches the machine while it is measured
    """
    threads = worker_threads()
    machine = provenance(here, threads)["machine"] | {"last_level_cache": last_level(here)}
    # The advice comes first, as measuring would disturb what it looks at.
    improve = [*complaints, *advice(here, threads)]
    if wrong_build := torch_advice(here):
        improve.insert(0, wrong_build)
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
    """The ceilings of `harness.run.ceilings`, the best so far; measured again unless `quick`."""
    try:
        ceilings = stored(here, threads) if quick else measured(here, threads, monitor)
    except WorkerFailure as failure:
        return {"problem": failure.reason}
    return asdict(ceilings) if ceilings else {}


def _instruments(here: Platform, threads: int) -> JsonObject:
    """The steps of the clock, and how far two preparations of one workload differ. Infinite numbers become
    null; the noise is infinite where the machine was too disturbed to tell it."""
    try:
        with meters(here, threads, 2) as pair:
            clock, pairs = pair[0].ask("clock", 60), clock_differences(pair)
    except WorkerFailure as failure:
        return {"problem": failure.reason}
    found: JsonObject = {"clock": clock}
    for workload, seen in pairs.items():
        numbers = {"ratio": seen.ratio, "low": seen.low, "high": seen.high, "floor": noise_of(seen)}
        found[workload] = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return found


def clock_differences(pair: list[WorkerProcess], seconds: float = SECONDS) -> dict[str, Comparison]:
    """Compares each workload with itself. Each of the two workers prepares it anew in every block, so the
    ratio is what two equal implementations differ by on this machine. Raises WorkerFailure."""
    return {workload: _difference(pair, workload, seconds) for workload in WORKLOADS}


def _difference(pair: list[WorkerProcess], workload: str, seconds: float) -> Comparison:
    def prepare(*_: object) -> None:
        for worker in pair:
            worker.ask("prepare", 120, workload=workload)

    policy = Policy(blocks=MIN_BLOCKS, budget_s=seconds, begin_block=prepare)
    samples = {str(i): lambda w=w: w.ask("sample", 60, at_least=SAMPLE_S) for i, w in enumerate(pair)}
    rounds = measure(samples, policy)
    for reason in rounds.dropped.values():
        raise WorkerFailure("error", reason)
    return compare(rounds.series("0"), rounds.series("1"), blocks=rounds.blocks)
