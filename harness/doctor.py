"""`python -m harness doctor`: what this machine is, what it can tell apart, and what would improve that."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kernels
from harness import instruments
from harness.advice import advice
from harness.ceilings import datasheets, last_level, measured, meters, stored
from harness.disturbance import monitor_for
from harness.errors import NothingRan, UsageError
from harness.findings import text
from harness.plan import parse_threads
from harness.provenance import LIBRARIES, provenance
from harness.statistics import noise_floor
from harness.threads import default_threads
from harness.workers import WorkerFailure, worker_pids
from kernels.platform import Platform, detect, devices, lookalike, version


def show(json_to: str | None = None, device: str | None = None, quick: bool = False) -> None:
    """Prints the findings, as text or JSON. Measures nothing on a device that a run is measuring."""
    try:
        here = detect(device)
    except LookupError as error:
        raise UsageError(str(error)) from None
    complaints: list[str] = []
    with contextlib.ExitStack() as held:
        if not quick:
            from harness.session import device_lock  # loads what reads records, which --quick does without

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


def examine(
    here: Platform,
    conditions: Mapping[str, str] | None = None,
    complaints: Sequence[str] = (),
    quick: bool = False,
) -> dict[str, Any]:
    """Plain values in SI units.

    conditions: clocks and the like, as the driver gives them now
    complaints: what is wrong with them
    quick:      measures nothing; ceilings are those of an earlier time, if there are any
    """
    threads = parse_threads(os.environ.get("OMP_NUM_THREADS")) or default_threads()  # as a run
    machine = provenance(here, threads)["machine"] | {"last_level_cache": last_level(here)}
    improve = [*complaints, *advice(here, threads)]  # before our own work disturbs what it looks at
    runs = [i for op in kernels.OPS for i in kernels.implementations(op) if i.available(here).ok]
    return {
        "machine": {name: value for name, value in machine.items() if value not in ("", 0)},
        "devices": {device: f"{p.kind} {p.arch} {p.name}" for device, p in devices().items()},
        "libraries": {name: version(name) or lookalike(name) or "not installed" for name in LIBRARIES},
        "ceilings": _ceilings(here, threads, quick),
        "datasheet": datasheets(here),
        "instruments": {} if quick else _instruments(here, threads),
        "conditions": dict(conditions or {}),
        "runs here": {f"{i.op} {i.name}": "checked only" if i.interpreted(here) else "timed" for i in runs},
        "what would improve it": improve,
    }


def _ceilings(here: Platform, threads: int, quick: bool) -> dict[str, Any]:
    """Those of `harness.ceilings`, measured again: the best so far."""
    try:
        found = stored(here, threads) if quick else measured(here, threads)
    except WorkerFailure as failure:
        return {"problem": failure.reason}
    return asdict(found) if found else {}


def _instruments(here: Platform, threads: int) -> dict[str, Any]:
    """The clock's steps, and how far equal things differ; null for what is infinite: a floor where the pair
    says only that the machine was disturbed."""
    try:
        with meters(here, threads, 2) as pair:
            clock, pairs = instruments.clock(pair[0]), instruments.differences(pair)
    except WorkerFailure as failure:
        return {"problem": failure.reason}
    return {"clock": clock} | {
        workload: {
            name: value if math.isfinite(value) else None
            for name, value in (
                ("ratio", seen.ratio),
                ("low", seen.low),
                ("high", seen.high),
                ("floor", noise_floor(seen)),
            )
        }
        for workload, seen in pairs.items()
    }
