"""`python -m harness serving run`."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import FAILED, NOTHING_RAN, OK, HarnessError, NothingRan, UsageError
from harness.files import write
from harness.machine.monitor import monitor_for
from harness.machine.provenance import surroundings
from harness.serving.live.ab.arms import parse_arms
from harness.serving.live.ab.journal import Journal
from harness.serving.live.ab.rejection import Rules
from harness.serving.live.ab.session import Session, Settings
from harness.serving.live.ab.summary import summarise, table
from harness.serving.live.checkpoint.directory import check_model, default_model
from harness.serving.live.client.client import Client, require_client
from harness.serving.live.client.load import Load
from harness.serving.live.engine import launch
from harness.serving.live.engine.observe import observe
from harness.serving.live.engine.servers import Servers
from harness.serving.live.engine.time_slices import require_cpu
from harness.serving.live.process.launching import free_port, termination_is_an_interrupt
from kernels.platform import detect, version

LEAST_DISK = 256 << 20  # bytes: results, logs and a trace


@dataclass(frozen=True)
class RunRequest:
    """The command's options as given."""

    model: str
    engine: str
    client: str
    arms: tuple[str, ...]
    flags: tuple[str, ...]
    load: Load
    pairs: int
    seed: int
    out: str
    resume: bool
    trace: bool
    routing_log: bool
    prefill_pattern: str
    slice_s: float
    renew: int
    keep_disturbed: bool
    one_at_a_time: bool
    port: int | None
    start_timeout: float
    run_timeout: float
    json_to: str | None
    quiet: bool


def run(request: RunRequest) -> int:
    """Returns the exit code; raises HarnessError."""
    started = time.monotonic()

    def say(line: str) -> None:
        if not request.quiet:
            print(f"{time.monotonic() - started:6.0f} s  {line}", file=sys.stderr, flush=True)

    arms = parse_arms(request.arms)
    if request.slice_s:
        require_cpu(detect())
        if request.one_at_a_time or request.port is not None:
            raise UsageError(
                "--slice needs all servers up, each on a port of its own: not with --port, --one-at-a-time"
            )
    kind = launch.kind_for(request.engine)
    if request.port is not None:
        free_port(request.port)
    require_client(client_kind := request.client or _client_of(request.engine))
    folder = Path(request.out).absolute()
    _require_disk(folder)
    model = default_model(say=say) if request.model == "default" else Path(request.model)
    check_model(model)
    settings = Settings(
        tuple(arms),
        request.load,
        request.pairs,
        request.seed,
        _rules(request),
        run_timeout_s=request.run_timeout,
        slice_s=request.slice_s,
        renew=request.renew,
    )
    plan = _plan(request, settings, model, kind)
    journal = Journal.resume(folder, plan) if request.resume else Journal.create(folder, plan)
    with (
        termination_is_an_interrupt(),
        _a_disk_that_fails_is_one_line(folder),
        Client(client_kind, request.engine, model.resolve(), folder) as client,
        Servers(
            kind,
            model.resolve(),
            folder,
            client,
            request.load,
            port=request.port,
            flags=request.flags,
            start_timeout_s=request.start_timeout,
            together=not request.one_at_a_time,
            say=say,
        ) as servers,
    ):
        if request.trace or request.routing_log:
            for arm in arms:
                at = folder / "observed" / arm.name
                if any(line["arm"] == arm.name for line in journal.of("observed")):
                    continue
                seen = observe(
                    servers, client, arm, request.load, at,
                    trace=request.trace, routing=request.routing_log, seed=request.seed,
                    run_timeout_s=request.run_timeout,
                )  # fmt: skip
                journal.append(
                    "observed",
                    {
                        "arm": arm.name,
                        "trace": _inside(seen.trace, folder),
                        "routing": _inside(seen.routing, folder),
                        "result": _inside(seen.result, folder),
                    },
                )
                say(f"observed {arm.name}: {seen.trace or ''} {seen.routing or ''}")
        monitor = monitor_for(detect(), lambda: [*servers.pids(), *client.pids()])
        for line in monitor.before():
            say(f"warning: {line}")
        Session(settings, servers, client, journal, monitor, say).run()
    return report(journal, request.json_to, request.quiet)


def report(journal: Journal, json_to: str | None = None, quiet: bool = False) -> int:
    """Prints what the journal holds. The exit code: 1 where a pair was given up, 3 where none finished."""
    lines = journal.lines()
    summary = summarise(lines, journal.folder)
    if json_to:
        write(json_to, json.dumps(summary, indent=1) + "\n")
    if not quiet and json_to != "-":
        print(table(summary))
    if not summary["pairs"]:
        return NOTHING_RAN if summary["asked"] else OK
    return FAILED if summary["given_up"] else OK


def _client_of(engine: str) -> str:
    return engine if engine in ("vllm", "sglang") else "vllm"


def _plan(request: RunRequest, settings: Settings, model: Path, kind: launch.Kind) -> dict[str, Any]:
    """What a series of pairs is; --resume asks for the same."""
    return {
        "schema": 1,
        "model": model.name if request.model == "default" else str(model),
        "engine": request.engine,
        "engine_version": version(kind.module) if kind.module else None,
        "client": request.client or _client_of(request.engine),
        "flags": list(request.flags),
        "arms": [arm.facts() for arm in settings.arms],
        "load": settings.load.facts(),
        "pairs": settings.pairs,
        "seed": settings.seed,
        "slice_s": settings.slice_s,
        "renew": settings.renew,
        "rules": settings.rules.facts(),
        **surroundings(),
    }


def _rules(request: RunRequest) -> Rules:
    text = request.prefill_pattern
    try:
        pattern = tuple(int(part) for part in text.split("+")) if text not in ("", "any") else ()
        return Rules(pattern, text == "any", disturbed=not request.keep_disturbed)
    except ValueError:
        raise UsageError(
            f"cannot read --prefill-pattern {text!r}: write how many are prefilled together, as 1+3, or any"
        ) from None


def _require_disk(folder: Path) -> None:
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < LEAST_DISK:
        raise NothingRan(
            f"{free >> 20} MiB are free in {place}, {LEAST_DISK >> 20} MiB are needed: choose another --out"
        )


@contextlib.contextmanager
def _a_disk_that_fails_is_one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = error.filename or folder
        raise HarnessError(
            f"cannot write to {what}: {error.strerror}; finished runs stay in {folder}, --resume goes on"
        ) from None


def _inside(file: Path | None, folder: Path) -> str | None:
    return str(file.relative_to(folder)) if file else None
