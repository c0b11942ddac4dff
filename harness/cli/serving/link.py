"""`python -m harness serving link`: TPOT, TTFT and throughput predicted from the times of kernels."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from harness.cli.options import json_option
from harness.errors import FAILED, OK, UsageError
from harness.files import write

if TYPE_CHECKING:
    from harness.serving.ledger.bounds import ChangeBound
    from harness.serving.ledger.prediction import KernelChange
    from harness.serving.link.closed_loop import ClosedLoop
    from harness.serving.link.model import Link
    from harness.serving.trace.result import Trace
    from shapes.attention import Parallel

Number = TypeVar("Number", int, float)
KV = {"bf16": "bfloat16", "fp8": "fp8"}
CONCURRENCY = "4,8,16,32,64"
ALLOWED = 0.08  # mean error of TPOT that a calibrated model may have, in leave-one-out
TIME = re.compile(r"([0-9]*\.?[0-9]+)(ms|s|us)?")
BEFORE_AFTER = re.compile(r"(.+?)\.\.(.+)")
OF_RATE = "is of requests that come at a rate"
NEEDS = {
    "store_calibration": ("calibrate", "keeps what --calibrate FILE reads"),
    "row": ("ledger", "names what --ledger FILE writes down"),
    "burstiness": ("request_rate", OF_RATE),
    "ramp_from": ("request_rate", OF_RATE),
    "requests": ("request_rate", OF_RATE),
}
"""Options that do nothing without another one, and why."""
OF_CLOSED_LOOP = ("waves", "what_if", "target_tpot", "observed", "ledger")
STANDS_ALONE = {
    "validate": (
        "predicts what was measured, as it was measured, and nothing else",
        ("isl", "osl", "concurrency", "request_rate", *OF_CLOSED_LOOP),
    ),
    "request_rate": ("is of no fixed number in flight", OF_CLOSED_LOOP),
}
"""Options that leave others without effect, and why."""
OF_POINTS = ("range_ratio", "prefill_tokens", "recv_interval")
BOUNDS_ALONE = {"hardware", "engine", "observed", "what_if", "json_to"}
"""Options that ask for bounds and for nothing of a model."""


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The command's options. given: names of those that the user wrote, as they are here"""

    given: frozenset[str]
    hardware: str | None
    engine: str | None
    any_kernel: bool
    assumed: bool
    tp: int
    ep: int
    dp_attention: bool
    isl: int
    osl: int
    concurrency: str | None
    range_ratio: float
    prefill_tokens: int
    waves: int
    recv_interval: int
    request_rate: str
    burstiness: float
    ramp_from: float
    requests: int
    tables: str | None
    runs: tuple[str, ...]
    calibrate: tuple[str, ...]
    store_calibration: str | None
    trace: str | None
    kv_dtype: str
    launch: str
    what_if: tuple[str, ...]
    target_tpot: str | None
    observed: str | None
    validate: bool
    ledger: str | None
    row: str
    json_to: str | None


@click.command("link")
@click.option("--hardware", help="The machine.  [default: that of --tables, or h200]")
@click.option("--engine", help="[default: that of --tables, or sglang]")
@click.option(
    "--any-kernel",
    is_flag=True,
    help="Also from tables of another kernel than the engine runs, with wide intervals.",
)
@click.option(
    "--assumed", is_flag=True, help="Take times that nobody measured from data sheets, with wide intervals."
)
@click.option("--tp", default=8, show_default=True, help="Tensor parallelism.")
@click.option("--ep", default=1, show_default=True, help="Expert parallelism, 1 or as --tp.")
@click.option("--dp-attention", is_flag=True, help="Refused so far, with the reason.")
@click.option("--isl", default=1024, show_default=True, help="Input tokens of a request, at most.")
@click.option("--osl", default=1024, show_default=True, help="Output tokens of a request, at most.")
@click.option(
    "--concurrency",
    metavar="N,N...",
    help="Requests in flight.  [default: 4,8,16,32,64; of a rate: what the cache holds]",
)
@click.option(
    "--range-ratio",
    default=0.8,
    show_default=True,
    help="Lengths are uniform from this times to 1 times; 1: all alike, then requests stay in step.",
)
@click.option(
    "--prefill-tokens",
    default=8192,
    show_default=True,
    help="Of one step: SGLang's --chunked-prefill-size, vLLM's --max-num-batched-tokens, TensorRT-LLM's "
    "--max_num_tokens.",
)
@click.option(
    "--waves", default=10, show_default=True, help="Prompts for each place; the first come all at once."
)
@click.option(
    "--recv-interval",
    default=1,
    show_default=True,
    help="Decode steps between looks for requests: SGLang's --scheduler-recv-interval.",
)
@click.option(
    "--request-rate",
    default="",
    metavar="R,R...",
    help="Requests a second, in place of a fixed number in flight; then --concurrency is the most at once.",
)
@click.option(
    "--burstiness", default=1.0, show_default=True, help="Of their gaps: 1 Poisson's, more is evener."
)
@click.option("--ramp-from", default=0.0, metavar="R", help="The rate that they begin at.")
@click.option("--requests", default=1000, show_default=True, help="That come at a rate; at most 10000.")
@click.option("--tables", metavar="DIR", help="Per-op times in AIConfigurator's files and columns.")
@click.option("--runs", multiple=True, metavar="RUN", help="Runs of this suite: their times come first.")
@click.option(
    "--calibrate",
    multiple=True,
    metavar="FILE",
    help="Serving results of this system, of any client: a few points are enough.",
)
@click.option(
    "--store-calibration", metavar="FILE", help="Keep what --calibrate read, as a file for --calibrate."
)
@click.option("--trace", metavar="FILE", help="A profiler's trace, for what is on the critical path.")
@click.option("--kv-dtype", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option(
    "--launch",
    type=click.Choice(["graph", "eager"]),
    default="graph",
    show_default=True,
    help="How decode steps are launched.",
)
@click.option(
    "--what-if",
    multiple=True,
    metavar="OP[:PART]=FACTORx",
    help="mla_decode=2.0x, fused_moe=1.3x(1.2..1.4), block_scale_gemm:qkv_a@decode=saved:5us; all together.",
)
@click.option("--target-tpot", metavar="MS", help="Which speedups it would need: 20ms.")
@click.option("--observed", metavar="BEFORE..AFTER", help="Bounds without a model: 53.19ms..28.37ms.")
@click.option("--validate", is_flag=True, help="Hold the model against what was measured.")
@click.option("--ledger", metavar="FILE", help="Write the predictions of --what-if down there ...")
@click.option("--row", default="", metavar="NAME", help="... under this name; `observe` adds what was seen.")
@json_option("Write JSON there instead of tables.")
def link(**options: Any) -> None:
    """TPOT, TTFT and throughput of DeepSeek-R1 from the times of its kernels, and what a change of a kernel
    is worth, with 90 % intervals. Exit code 1 where --validate finds a mean error over 8 %."""
    source_of = click.get_current_context().get_parameter_source
    given = frozenset(name for name in options if source_of(name) is ParameterSource.COMMANDLINE)
    sys.exit(answer(LinkOptions(**options, given=given)))


def answer(options: LinkOptions) -> int:
    """Prints what is predicted, or writes it as JSON. Raises UsageError."""
    from harness.serving.link.changes import parse_change
    from harness.serving.link.forecast import forecast, record
    from harness.serving.link.report import as_json, as_text, bounds_json, bounds_text
    from harness.serving.link.times.tables import bundled
    from harness.serving.names import engine_name, hardware_name

    changes = [parse_change(text) for text in options.what_if]
    _require_effect(options.given)
    if options.ledger and not (changes and options.row):
        raise UsageError("--ledger needs a --row to be called by, and a --what-if: differences are predicted")
    target = _milliseconds(options.target_tpot) if options.target_tpot else None
    bounds = _bounds(options.observed, changes)
    asked = hardware_name(options.hardware or "h200"), engine_name(options.engine or "sglang")
    if bounds and asked not in bundled() and options.given <= BOUNDS_ALONE:
        if options.json_to:
            write(options.json_to, bounds_json(bounds))
        else:
            print(bounds_text(bounds))
        return OK
    model = _model(options)
    if options.store_calibration:
        store(model, options.store_calibration)
    if options.validate:
        return validate(model, options.json_to)
    if options.request_rate:
        return open_loop(model, options)
    forecasts = [forecast(model, load, changes, target) for load in _loads(options)]
    if options.ledger:
        record(Path(options.ledger), options.row, model, changes, forecasts)
    if options.json_to:
        write(options.json_to, as_json(model, forecasts, bounds, options.what_if, target))
    else:
        print(as_text(model, forecasts, bounds, options.what_if, target))
    return OK


def _require_effect(given: Collection[str]) -> None:
    """Raises UsageError for an option that another one, or none, leaves without effect."""
    for name, (needed, why) in NEEDS.items():
        if name in given and needed not in given:
            raise UsageError(f"{_flag(name)} {why}: give {_flag(needed)} too")
    for name, (why, others) in STANDS_ALONE.items():
        if name in given and (dropped := [other for other in others if other in given]):
            raise UsageError(f"{_flag(name)} {why}: leave out {' and '.join(map(_flag, dropped))}")
    points_only = [name for name in OF_POINTS if name in given]
    if "validate" in given and points_only and "calibrate" not in given:
        flags = " and ".join(map(_flag, points_only))
        raise UsageError(
            f"--validate uses {flags} only to read --calibrate FILE: give FILE, or leave out {flags}"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def store(model: Link, file: str) -> None:
    """Keeps the model's own points for a later --calibrate. Raises UsageError where they are of several
    versions."""
    from harness.serving.link.stored_calibration import StoredCalibration, System
    from harness.serving.link.stored_calibration import store as write_calibration

    parallel, versions = model.structure.parallel, model.calibrated_versions
    if len(versions) > 1:
        known = " and ".join(version or "one that is not said" for version in versions)
        raise UsageError(f"the points are of {model.engine} {known}: a calibration is of one version")
    system = System(
        hardware=model.hardware,
        engine=model.engine,
        version=versions[0],
        tp=parallel.tp,
        ep=parallel.ep,
        dp=parallel.dp,
        kv=model.kv,
    )
    kept = StoredCalibration(
        calibration_of=system, runs=model.calibrated_with, unsaid=model.unsaid, points=model.calibration
    )
    write_calibration(Path(file), kept)


def open_loop(model: Link, options: LinkOptions) -> int:
    """Prints what is predicted of requests that come at a rate."""
    from harness.serving.link.predictions import open_outlook
    from harness.serving.link.report import open_json, open_text
    from harness.serving.link.simulation import OpenLoop

    at_once = _numbers(options.concurrency or f"{options.requests}", "--concurrency", int)
    if len(at_once) > 1:
        raise UsageError("--concurrency is the most at once where requests come at a rate: give one number")
    looks = [
        open_outlook(
            model,
            OpenLoop(
                **_lengths(options),
                concurrency=at_once[0],
                rate=rate,
                burstiness=options.burstiness,
                ramp_from=options.ramp_from,
                requests=options.requests,
            ),
        )
        for rate in _numbers(options.request_rate, "--request-rate", float)
    ]
    if options.json_to:
        write(options.json_to, open_json(model, looks))
    else:
        print(open_text(model, looks))
    return OK


def validate(model: Link, json_to: str | None) -> int:
    """Holds the model against what was measured; exit code 1 where its mean error is over ALLOWED."""
    from harness.serving.link.report import series_text, validation_json
    from harness.serving.link.validation import CALIBRATION, HELD, validated

    series = validated(model)
    if json_to:
        write(json_to, validation_json(series))
    else:
        print("\n\n".join(series_text(summary, rows) for summary, rows in series))
    judged = [summary for summary, _ in series if summary.use in (CALIBRATION, HELD)]
    return OK if all(summary.tpot.mean <= ALLOWED for summary in judged) else FAILED


def _model(options: LinkOptions) -> Link:
    from harness.serving.link.model import link as link_model
    from harness.serving.link.times.measured_times import read_measured_times
    from harness.serving.link.times.tables import read_tables
    from harness.serving.names import engine_name, hardware_name

    tables = read_tables(Path(options.tables)) if options.tables else None
    hardware = hardware_name(options.hardware or (tables.device if tables else "h200"))
    engine = engine_name(options.engine or (tables.engine if tables else "sglang"))
    trace = _trace(options.trace) if options.trace else None
    model = link_model(
        hardware,
        engine,
        parallel=_parallel(options.tp, options.ep, options.dp_attention),
        kv=KV[options.kv_dtype],
        eager=options.launch == "eager",
        tables=tables,
        exposure=_exposure(trace, hardware, engine) if trace else None,
        measured_times=read_measured_times(options.runs) if options.runs else None,
        any_kernel=options.any_kernel,
        assumed=options.assumed,
        own=options.calibrate,
        range_ratio=options.range_ratio,
        prefill_tokens=options.prefill_tokens,
        recv_interval=options.recv_interval,
    )
    if trace is None or trace.engine:
        return model
    note = f"nothing in {trace.path} tells its engine: taken to be {engine}"
    return replace(model, notes=(*model.notes, note))


def _loads(options: LinkOptions) -> list[ClosedLoop]:
    from harness.serving.link.closed_loop import ClosedLoop

    return [
        ClosedLoop(**_lengths(options), concurrency=count, waves=options.waves)
        for count in _numbers(options.concurrency or CONCURRENCY, "--concurrency", int)
    ]


def _lengths(options: LinkOptions) -> dict[str, Any]:
    names = ("isl", "osl", "range_ratio", "prefill_tokens", "recv_interval")
    return {name: getattr(options, name) for name in names}


def _numbers(text: str, option: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"cannot read {option} {text!r}; write 16 or 4,8,16") from None


def _parallel(tp: int, ep: int, dp_attention: bool) -> Parallel:
    from shapes.attention import Parallel

    try:
        return Parallel(tp=1, dp=tp, ep=ep) if dp_attention else Parallel(tp=tp, ep=ep)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _milliseconds(text: str) -> float:
    match = TIME.fullmatch(text.strip())
    if not match or float(match[1]) <= 0:
        raise UsageError(f"cannot read time {text!r}; write 20ms")
    return float(match[1]) * {"s": 1e3, "us": 1e-3}.get(match[2] or "ms", 1.0)


def _trace(file: str) -> Trace:
    from harness.serving.trace import decompose

    return decompose(file)


def _exposure(trace: Trace, hardware: str, engine: str) -> dict[tuple[str, str], float]:
    """By phase and op class: the share that is on the critical path. Raises UsageError for a trace of another
    machine, engine or model, or without decode steps."""
    from harness.serving.names import hardware_name

    file = trace.path
    if trace.engine not in ("", engine):
        raise UsageError(f"{file} is a trace of {trace.engine}, not {engine}: what hides there may not here")
    for model in {device.model for device in trace.devices}:
        if hardware_name(model) != hardware:
            of = model or "a machine that it does not name"
            raise UsageError(f"{file} is a trace of {of}, not {hardware}: what hides there may not here")
    phases = {name: trace.exposure(name) for name in ("decode", "prefill")}
    if not phases["decode"]:
        raise UsageError(f"no decode step was found in {file}: its exposure cannot be used")
    lacks = [op for op in ("mla_decode", "fused_moe") if op not in phases["decode"]]
    if lacks:
        raise UsageError(
            f"{file} is no trace of DeepSeek-R1: its decode steps have no {' and no '.join(lacks)}"
        )
    return {
        (name, op): share
        for name, shares in phases.items()
        for op, share in (shares or phases["decode"]).items()
    }


def _bounds(observed: str | None, changes: Sequence[KernelChange]) -> list[ChangeBound]:
    """Of each change alone, from a time before and one after."""
    from harness.serving.ledger.bounds import bounds

    if observed is None:
        return []
    match = BEFORE_AFTER.fullmatch(observed.replace(" ", ""))
    if not match:
        raise UsageError(f"cannot read --observed {observed!r}; write BEFORE..AFTER: 53.19ms..28.37ms")
    before, after = _milliseconds(match[1]), _milliseconds(match[2])
    if not any(change.factor for change in changes):
        raise UsageError("--observed needs a factor to be held against: --what-if OP=FACTORx")
    return bounds(before, after, changes)
