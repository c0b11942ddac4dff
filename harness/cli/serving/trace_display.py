"""A decomposed trace as text and as JSON."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType

from harness.report.fitting_table import table_of
from harness.report.text import microseconds
from harness.serving.trace.classify import Phase
from harness.serving.trace.result import NO_TIME, KernelTime, Times, Trace

# As text


def trace_text(trace: Trace, phase: Phase | None, top: int) -> RenderableType:
    """What `serving trace` prints: sums over the steps of a phase or, without one, over the whole trace; then
    the median step of the phase, or of each; then the first `top` kernels, and those of no known class."""
    parts: list[RenderableType] = [*_head(trace), "", *_classes(trace, phase)]
    if len(trace.steps) > 1:
        for phase_of_steps in trace.phases():
            if phase in (None, phase_of_steps):
                parts += _per_step(trace, phase_of_steps)
    kernels = [kernel for kernel in trace.kernels if phase in (None, kernel.phase)]
    return Group(*parts, *_kernels(kernels, top, trace.on), *_unknown(kernels, trace.time_ns()))


def _head(trace: Trace) -> Iterator[str]:
    """The lines above the tables: where the trace is from, its devices, how steps were told, findings."""
    line = {"torch": "torch.profiler", "rocprof": "rocprof", "nsys": "nsys stats"}[trace.source]
    if trace.engine:
        line += f" of {trace.engine}"
    if trace.rank is not None and trace.world_size:
        line += f", rank {trace.rank} of {trace.world_size}"
    if trace.partial:
        line += "; BROKEN OFF: sums and shares are of a part only"
    yield f"{trace.path}: {line}"
    what, where = ("kernels and copies", "streams") if trace.on == "gpu" else ("operators", "threads")
    if trace.on == "cpu":
        yield "no kernels in it: operators on the CPU, each without those inside it"
    for device in trace.devices:
        model = f" ({device.model})" if device.model else ""
        yield (
            f"device {device.name}{model}: {what}: {device.calls}, {where}: {device.streams}; "
            f"sum {_us(device.sum_ns)} in a span of {_us(device.span_ns)}: busy {_us(device.busy_ns)}, "
            f"overlapped {_us(device.overlapped_ns)}, idle {_us(device.idle_ns)} "
            f"({_us(device.idle_between_steps_ns)} of it outside of steps)"
        )
        if device.communication_ns:
            yield (
                f"  communication runs for {_us(device.communication_ns)}, "
                f"{_us(device.exposed_communication_ns)} of it exposed: no computation covers it"
            )
    for phase, why, count in trace.evidence():
        yield f"{phase} steps: {count}, by {why}"
    for finding in trace.findings:
        yield f"{finding.severity}: {finding.message}"


def _classes(trace: Trace, phase: Phase | None) -> list[RenderableType]:
    """The table of op classes, with a line for their sum."""
    classes = trace.by_class(phase)
    total = functools.reduce(Times.plus, classes.values(), NO_TIME)
    rows = []
    for name, times in [*classes.items(), ("sum", total)]:
        exposure = _percent(times.exposed_ns, times.time_ns)
        rows.append({"class": name, **_cells(times, total.time_ns), "of its time": exposure})
    title = f"of {phase} steps" if phase else "of the whole trace"
    return [title, table_of(rows)]


def _per_step(trace: Trace, phase: Phase) -> list[RenderableType]:
    """The table of op classes in the median step of a phase."""
    steps = trace.steps_of(phase)
    if not steps:
        return []
    span = statistics.median(step.span_ns for step in steps)
    idle = statistics.median(step.idle_ns for step in steps)
    title = f"\n{phase} step: median of {len(steps)}; {_us(span)} long, {_us(idle)} of it idle"
    periods = [step.period_ns for step in steps if step.period_ns is not None]
    if periods:
        title += f", {_us(statistics.median(periods))} from start to start"
    per_step = {name: trace.per_step(name, phase) for name in (*trace.by_class(phase), "host")}
    classes = {name: times for name, times in per_step.items() if times and times.exposed_ns}
    total = sum(times.time_ns for times in classes.values())
    rows = []
    for name, times in sorted(classes.items(), key=lambda item: -item[1].time_ns):
        spread = " to ".join(map(_us, times.least_and_most))
        rows.append({"class": name, **_cells(times, total), "least to most": spread})
    return [title, table_of(rows)]


def _kernels(kernels: Sequence[KernelTime], top: int, on: str) -> list[RenderableType]:
    """The table of the first `top` kernels. on: `gpu`, or `cpu`, where they are operators"""
    if not top or not kernels:
        return []
    total = sum(kernel.time_ns for kernel in kernels)
    what = "kernel" if on == "gpu" else "operator"
    rows = [
        {what: _short(kernel.name)} | _cells(kernel, total)
        | {"a call": _us(kernel.time_ns / max(kernel.calls, 1)), "class": kernel.op_class,
           "phase": kernel.phase, "shapes of the most time": next(iter(kernel.shapes), "")[:60]}
        for kernel in kernels[:top]
    ]  # fmt: skip
    others = [f"and {len(kernels) - top} more (--top, --json)"] if len(kernels) > top else []
    return ["", table_of(rows), *others]


def _unknown(kernels: Sequence[KernelTime], total_ns: float) -> list[RenderableType]:
    """The table of the kernels of no known class. total_ns: of the trace"""
    kernels = [kernel for kernel in kernels if kernel.op_class == "unknown"]
    if not kernels:
        return ["\nunknown: none"]
    time_ns, calls = sum(kernel.time_ns for kernel in kernels), sum(kernel.calls for kernel in kernels)
    share = f"{time_ns / (total_ns or 1):.2%}"
    head = f"\nunknown: {len(kernels)} names, {calls} calls, {_us(time_ns)}, {share} of the trace"
    rows = [{"kernel": _short(k.name), "time": _us(k.time_ns), "calls": k.calls} for k in kernels]
    return [head, table_of(rows)]


def _short(name: str) -> str:
    """A kernel's name in at most 60 characters: its two ends, which say most, if it is longer."""
    name = name.removeprefix("void ")
    return name if len(name) <= 60 else f"{name[:37]}...{name[-20:]}"


def _us(ns: float) -> str:
    return microseconds(ns / 1e3)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _cells(times: Times, total_ns: float) -> dict[str, str]:
    share = _percent(times.time_ns, total_ns)
    calls, exposed = f"{times.calls:.10g}", _us(times.exposed_ns)
    return {"time": _us(times.time_ns), "share": share, "calls": calls, "exposed": exposed}


# As JSON


def as_json(trace: Trace, phase: Phase | None = None) -> dict[str, Any]:
    """Everything, times in microseconds. phase: leaves out the rows of other phases"""
    classes = [
        _class_in_us(trace, name, times, phase_of_class)
        for phase_of_class in trace.phases()
        for name, times in trace.by_class(phase_of_class).items()
    ]
    classes.sort(key=lambda row: -row["time_us"])
    kernels = [_times_in_us(kernel) for kernel in trace.kernels]
    for row in kernels:
        shapes = row["shapes"].items()
        row["shapes"] = [{"dims": dims} | _in_us(times, without=["exposed_us"]) for dims, times in shapes]
    steps = [
        _in_us(step) | {"classes": {name: _times_in_us(times) for name, times in step.classes.items()}}
        for step in trace.steps
    ]
    unknown = [row for row in kernels if row["class"] == "unknown"]
    tables = {"classes": classes, "kernels": kernels, "steps": steps, "unknown": unknown}
    head = _in_us(trace, without=["kernels", "steps", "categories"]) | {
        "time_us": trace.time_ns() / 1e3, "devices": [_in_us(device) for device in trace.devices],
        "phases": [{"phase": of, "steps": count, "evidence": why} for of, why, count in trace.evidence()],
        "events": dict(trace.categories), "findings": [finding.model_dump() for finding in trace.findings],
    }  # fmt: skip
    if phase:
        tables = {name: [row for row in rows if row["phase"] == phase] for name, rows in tables.items()}
    return {"trace": head, **tables}


def _class_in_us(trace: Trace, name: str, times: Times, phase: Phase) -> dict[str, Any]:
    share = times.time_ns / (trace.time_ns(phase) or 1)
    per_step = trace.per_step(name, phase)
    in_step = _in_us(per_step, without=["least_and_most"]) if per_step else None
    return {"class": name, "phase": phase, **_times_in_us(times), "share": share, "per_step": in_step}


def _times_in_us(times: Times) -> dict[str, Any]:
    return _in_us(times) | {"exposure": times.exposure}


def _in_us(record: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a record, without some: `X_ns` as `X_us`, `op_class` as `class`."""
    fields = {"class" if name == "op_class" else name: value for name, value in vars(record).items()}
    for name in [name for name in fields if name.endswith("_ns")]:
        ns = fields.pop(name)
        fields[name.removesuffix("_ns") + "_us"] = None if ns is None else ns / 1e3
    return {name: value for name, value in fields.items() if name not in without}
