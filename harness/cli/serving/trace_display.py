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
    """phase: of which steps only; top: how many kernels."""
    parts: list[RenderableType] = [*_head(trace), "", *_classes(trace, phase)]
    if len(trace.steps) > 1:
        for each in trace.phases():
            parts += _per_step(trace, each) if phase in (None, each) else ()
    kernels = [kernel for kernel in trace.kernels if phase in (None, kernel.phase)]
    return Group(*parts, *_kernels(kernels, top, trace.on), *_unknown(kernels, trace.time_ns()))


def _head(trace: Trace) -> Iterator[str]:
    profiler = {"torch": "torch.profiler", "rocprof": "rocprof", "nsys": "nsys stats"}[trace.source]
    rank = f", rank {trace.rank} of {trace.world_size}" if trace.rank is not None and trace.world_size else ""
    partial = "; BROKEN OFF: sums and shares are of a part only" if trace.partial else ""
    engine = f" of {trace.engine}" if trace.engine else ""
    yield f"{trace.path}: {profiler}{engine}{rank}{partial}"
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
    by_class = trace.by_class(phase)
    total = functools.reduce(Times.plus, by_class.values(), NO_TIME)
    rows = [
        {"class": name}
        | _cells(times, total.time_ns)
        | {"of its time": _percent(times.exposed_ns, times.time_ns)}
        for name, times in (by_class | {"sum": total}).items()
    ]
    title = f"of {phase} steps" if phase else "of the whole trace"
    return [title, table_of(rows)]


def _per_step(trace: Trace, phase: Phase) -> list[RenderableType]:
    steps = trace.steps_of(phase)
    if not steps:
        return []
    span, idle = statistics.median(s.span_ns for s in steps), statistics.median(s.idle_ns for s in steps)
    periods = [step.period_ns for step in steps if step.period_ns is not None]
    period = f", {_us(statistics.median(periods))} from start to start" if periods else ""
    names = dict.fromkeys((*trace.by_class(phase), "host"))
    classes = {name: times for name in names if (times := trace.per_step(name, phase)) and times.exposed_ns}
    total = sum(times.time_ns for times in classes.values())
    rows = [
        {"class": name}
        | _cells(times, total)
        | {"least to most": " to ".join(map(_us, times.least_and_most))}
        for name, times in sorted(classes.items(), key=lambda item: -item[1].time_ns)
    ]
    title = f"\n{phase} step: median of {len(steps)}; {_us(span)} long, {_us(idle)} of it idle{period}"
    return [title, table_of(rows)]


def _kernels(kernels: Sequence[KernelTime], top: int, on: str) -> list[RenderableType]:
    if not top or not kernels:
        return []
    total = sum(kernel.time_ns for kernel in kernels)
    what = "kernel" if on == "gpu" else "operator"
    rows = [
        {what: _short(k.name)} | _cells(k, total)
        | {"a call": _us(k.time_ns / max(k.calls, 1)), "class": k.op_class, "phase": k.phase,
           "shapes of the most time": next(iter(k.shapes), "")[:60]}
        for k in kernels[:top]
    ]  # fmt: skip
    more = [f"and {len(kernels) - top} more (--top, --json)"] if len(kernels) > top else []
    return ["", table_of(rows), *more]


def _unknown(kernels: Sequence[KernelTime], total: float) -> list[RenderableType]:
    kernels = [kernel for kernel in kernels if kernel.op_class == "unknown"]
    if not kernels:
        return ["\nunknown: none"]
    time, calls = sum(k.time_ns for k in kernels), sum(k.calls for k in kernels)
    head = (
        f"\nunknown: {len(kernels)} names, {calls} calls, {_us(time)}, {time / (total or 1):.2%} of the trace"
    )
    rows = [{"kernel": _short(k.name), "time": _us(k.time_ns), "calls": k.calls} for k in kernels]
    return [head, table_of(rows)]


def _short(name: str, most: int = 60) -> str:
    """A kernel's name; of a long one the middle is left out, as both ends tell most."""
    name = name.removeprefix("void ")
    return name if len(name) <= most else f"{name[: most - 23]}...{name[-20:]}"


def _us(ns: float) -> str:
    return microseconds(ns / 1e3)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _cells(times: Times, total: float) -> dict[str, str]:
    share = _percent(times.time_ns, total)
    calls, exposed = f"{times.calls:.10g}", _us(times.exposed_ns)
    return {"time": _us(times.time_ns), "share": share, "calls": calls, "exposed": exposed}


# As JSON


def as_json(trace: Trace, phase: Phase | None = None) -> dict[str, Any]:
    """Everything, times in microseconds. phase: of its steps only."""
    classes = [
        {"class": name, "phase": of, **_times(times), "share": times.time_ns / (trace.time_ns(of) or 1),
         "per_step": per_step and _in_us(per_step, "least_and_most")}
        for of in trace.phases()
        for name, times in trace.by_class(of).items()
        for per_step in [trace.per_step(name, of)]
    ]  # fmt: skip
    classes.sort(key=lambda row: -row["time_us"])
    kernels = [_times(kernel) for kernel in trace.kernels]
    for row in kernels:
        row["shapes"] = [{"dims": k} | _in_us(of, "exposed_us") for k, of in row["shapes"].items()]
    steps = [
        _in_us(step) | {"classes": {name: _times(times) for name, times in step.classes.items()}}
        for step in trace.steps
    ]
    unknown = [row for row in kernels if row["class"] == "unknown"]
    rows = {"classes": classes, "kernels": kernels, "steps": steps, "unknown": unknown}
    head = _in_us(trace, "kernels", "steps", "categories") | {
        "time_us": trace.time_ns() / 1e3, "devices": [*map(_in_us, trace.devices)],
        "phases": [{"phase": of, "steps": count, "evidence": why} for of, why, count in trace.evidence()],
        "events": dict(trace.categories), "findings": [finding.model_dump() for finding in trace.findings],
    }  # fmt: skip
    of_phase = {what: [row for row in all_ if phase in (None, row["phase"])] for what, all_ in rows.items()}
    return {"trace": head, **of_phase}


def _times(times: Times) -> dict[str, Any]:
    return _in_us(times) | {"exposure": times.exposure}


def _in_us(record: Any, *without: str) -> dict[str, Any]:
    """A record's fields: `X_ns` as `X_us`, `op_class` as `class`."""
    fields = {"class" if name == "op_class" else name: value for name, value in vars(record).items()}
    for name in [name for name in fields if name.endswith("_ns")]:
        ns = fields.pop(name)
        fields[name.removesuffix("_ns") + "_us"] = None if ns is None else ns / 1e3
    return {name: value for name, value in fields.items() if name not in without}
