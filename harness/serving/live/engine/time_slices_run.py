"""Runs in time slices: clients load their engines at the same time, each its own; the engines take turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError
from harness.machine.monitor.base import Monitor
from harness.serving.live.client.client import Client, ClientFailed
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.client.request_times import RequestTimes, request_times
from harness.serving.live.engine.engine import Engine, EngineDied
from harness.serving.live.engine.time_slices import OwnClock, TimeSlices

BESIDE = "the run beside it failed"


@dataclass(frozen=True)
class ClientOutcome:
    """What one client left, or why it left nothing.

    clock: of its engine; times: by that clock; until: when, by that clock, the first of all runs was over
    """

    clock: OwnClock
    times: RequestTimes | None = None
    until: float = 0.0
    error: HarnessError | None = None


def run_in_time_slices(
    client: Client,
    engines: Sequence[Engine],
    results: Sequence[Path],
    load: ClientLoad,
    seed: int,
    *,
    slice_s: float,
    timeout_s: float,
    monitor: Monitor,
) -> tuple[list[ClientOutcome], str]:
    """One run of each engine, its result in the file of the same place; what disturbed them. Raises
    HarnessError where the client keeps no times by which runs can be told apart."""
    interrupted = threading.Event()
    disturbances: list[str] = []
    # Who has ended stays until all have: what it used can then still be read.
    everyone = threading.Barrier(len(engines), lambda: disturbances.append(monitor.end()))

    def run(engine: Engine, result: Path) -> HarnessError | None:
        def watch() -> None:
            if interrupted.is_set():
                raise ClientFailed(BESIDE)
            engine.check("during a run")

        def ended() -> None:
            slices.finished(engine)
            everyone.wait()

        try:
            client.run(
                engine.url,
                engine.launch.model_name,
                load,
                seed=seed,
                result=result,
                deadline_s=timeout_s,
                watch=watch,
                ended=ended,
            )
        except BaseException as error:
            slices.finished(engine)
            everyone.abort()
            if isinstance(error, threading.BrokenBarrierError):
                return ClientFailed(BESIDE)
            if isinstance(error, (ClientFailed, EngineDied)):
                return error
            raise
        return None

    monitor.begin()
    began = time.monotonic()
    with TimeSlices(engines, slice_s) as slices, ThreadPoolExecutor(len(engines)) as pool:
        try:
            errors = list(pool.map(run, engines, results))
        except BaseException:
            interrupted.set()
            everyone.abort()
            raise
    ended = time.monotonic()
    clocks = [slices.clock(engine) for engine in engines]
    read = [None if error else request_times(result) for error, result in zip(errors, results, strict=True)]
    if len(engines) > 1:
        for times, result in zip(read, results, strict=True):
            if times and not (times.dated and all(began <= r.sent <= ended for r in times.requests)):
                raise HarnessError(
                    f"{result} does not date its requests by this machine's monotonic clock: runs of this "
                    "client cannot take turns; give no slices"
                )
    over = min(
        (max(r.tokens[-1] for r in times.requests) for times in read if times and times.requests), default=0.0
    )
    loaded = [
        ClientOutcome(clock, times and times.by(clock), clock(over), error)
        for clock, times, error in zip(clocks, read, errors, strict=True)
    ]
    return loaded, "; ".join(filter(None, disturbances))
