"""Observation of a server while it serves: a kernel trace of its first steps, and the routing log."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError
from harness.serving.live.ab.arms import EngineArm
from harness.serving.live.client.client import Client
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine.servers import Servers

TRACED_S = 60.0  # most that a trace may take to be written


@dataclass(frozen=True)
class ObservationFiles:
    """trace, routing: None where not asked for.

    trace:   the profiler's file of the run's prefills and some decode steps
    routing: npz of experts by step and layer, see plugin/routing.py
    result:  the client's file of the run during which they were taken
    """

    trace: Path | None
    routing: Path | None
    result: Path


def observe(
    servers: Servers,
    client: Client,
    arm: EngineArm,
    load: ClientLoad,
    folder: Path,
    *,
    trace: bool = True,
    routing: bool = True,
    seed: int = 0,
    run_timeout_s: float = 600.0,
) -> ObservationFiles:
    """One run of an arm on a server of its own that logs, which costs time: no run of this counts.

    Raises HarnessError where a log that was asked for did not come.
    """
    folder.mkdir(parents=True, exist_ok=True)
    traces, routes = folder / "profile", folder / "routes"
    for old in (traces, routes):
        shutil.rmtree(old, ignore_errors=True)
    result = folder / "result.json"  # run.json is what harness.results.read takes for a run of the suite
    engine = servers.start(arm, traces if trace else None, routes if routing else None)
    try:
        before = _size(routes)
        if trace:
            engine.post("/start_profile", TRACED_S)
        client.run(
            engine.url,
            engine.launch.model_name,
            load,
            seed=seed,
            result=result,
            deadline_s=run_timeout_s,
            watch=lambda: engine.check("while it was observed"),
        )
        if trace:
            engine.post("/stop_profile", TRACED_S)
        traced = _wait_for(traces, "*.trace.json*", 0) if trace else None
        if routing:
            # It is written every few seconds of routing: a further, short run brings the last part out.
            time.sleep(2.5)
            servers.client.run(
                engine.url,
                engine.launch.model_name,
                ClientLoad(32, 4, 1, 1),
                seed=1,
                result=folder / "flush.json",
                deadline_s=run_timeout_s,
            )
        routed = _wait_for(routes, "routing-*.npz", before) if routing else None
    finally:
        engine.stop()
    if trace and traced is None:
        raise HarnessError(f"the engine wrote no trace into {traces}; {engine.process.last_words()}")
    if routing and routed is None:
        raise HarnessError(f"the plug-in wrote no routing log into {routes}; {engine.process.last_words()}")
    return ObservationFiles(
        _kept(traced, folder / f"{arm.name}.trace.json.gz"),
        _kept(routed, folder / f"{arm.name}.routing.npz"),
        result,
    )


def _wait_for(folder: Path, pattern: str, larger_than: int) -> Path | None:
    """The newest such file, once it has stopped growing."""
    until, size = time.monotonic() + TRACED_S, -1
    while time.monotonic() < until:
        files = sorted(folder.glob(pattern), key=lambda f: f.stat().st_mtime)
        files = [file for file in files if "writing" not in file.name]
        if files and files[-1].stat().st_size == size > larger_than:
            return files[-1]
        size = files[-1].stat().st_size if files else -1
        time.sleep(0.5)
    return None


def _size(folder: Path) -> int:
    return max((file.stat().st_size for file in folder.glob("*.npz")), default=0)


def _kept(file: Path | None, to: Path) -> Path | None:
    if file is None:
        return None
    if file.suffix != ".gz" and to.suffix == ".gz":
        to = to.with_suffix("")
    shutil.copyfile(file, to)
    return to
