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

import click

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


@click.command("run")
@click.option(
    "--model",
    default="default",
    show_default=True,
    metavar="DIR|default",
    help="A model's directory; `default` makes a small DeepSeek-V3 here.",
)
@click.option(
    "--engine",
    default="vllm",
    show_default=True,
    metavar="vllm|sglang|tensorrt-llm|COMMAND",
    help="What serves it; a command has {model}, {port} and {name} filled in.",
)
@click.option(
    "--client",
    default="",
    metavar="vllm|sglang|COMMAND",
    help="What loads it, by default the engine's own; a command has {url} and {result} in it.",
)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME[:ITEM ...]",
    help="An arm, with A=1, --flag=value or a swap such as mla_decode=torch; the first is the base.",
)
@click.option("--flag", "flags", multiple=True, metavar="FLAG", help="A flag of the engine for all arms.")
@click.option("--isl", default=512, show_default=True, type=click.IntRange(1), help="Input tokens.")
@click.option("--osl", default=96, show_default=True, type=click.IntRange(2), help="Output tokens.")
@click.option("--concurrency", default=4, show_default=True, type=click.IntRange(1))
@click.option("--prompts", default=4, show_default=True, type=click.IntRange(1), help="Requests in a run.")
@click.option("--pairs", default=4, show_default=True, type=click.IntRange(0), help="Runs of each arm.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of the first pair.")
@click.option(
    "--slice",
    "slice_s",
    default=0.0,
    metavar="SECONDS",
    type=click.FloatRange(0, 10),
    help="Both runs of a pair at once, their engines (on CPUs) in turn for so long.",
)
@click.option(
    "--renew",
    default=0,
    metavar="PAIRS",
    type=click.IntRange(0),
    help="Start servers anew after so many (default: never).",
)
@click.option("--out", required=True, metavar="DIR", help="Journal, results, logs.")
@click.option("--resume", is_flag=True, help="Go on with the runs in --out.")
@click.option("--trace", is_flag=True, help="Take a kernel trace of each arm first (vLLM).")
@click.option("--routing-log", is_flag=True, help="Log which experts tokens go to, of each arm first (vLLM).")
@click.option(
    "--prefill-pattern",
    default="",
    metavar="N+N|any",
    help="How requests must be prefilled together; by default as in a first run that does not count.",
)
@click.option("--keep-disturbed", is_flag=True, help="Count runs that other processes disturbed.")
@click.option("--one-at-a-time", is_flag=True, help="Never keep two servers up.")
@click.option("--port", type=click.IntRange(1, 65535), help="Of the server; by default a free one.")
@click.option("--start-timeout", default=600.0, show_default=True, metavar="S")
@click.option("--run-timeout", default=600.0, show_default=True, metavar="S")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the summary there.")
@click.option("--quiet", is_flag=True)
def run_command(**options: Any) -> None:
    """Serve a model here and load it, arm by arm: real engine, real client, on loopback.

    Arms take turns in mirrored pairs with the same prompts. Runs that a rule rejects are made again and
    counted. The journal in --out has every finished run; --resume goes on from there.
    """
    keys = {"input_len": "isl", "output_len": "osl", "concurrency": "concurrency", "prompts": "prompts"}
    load = Load(**{field: options.pop(key) for field, key in keys.items()})
    sys.exit(run(RunRequest(load=load, **options)))
