"""A decomposed trace as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from harness.report.text import microseconds, table
from harness.serving.trace.classify import Phase
from harness.serving.trace.result import Device, KernelTime, PerStep, Times, Trace, TraceStep

NAME = 90  # characters of a kernel's name
STEPS = 40  # listed at most, with --steps


def as_text(trace: Trace, phase: Phase | None, top: int, each_step: bool) -> str:
    """What a person reads. phase: of which steps only; top: how many kernels."""
    parts = ["\n".join(_head(trace)), _classes(trace, phase)]
    if len(trace.steps) > 1:
        phases = [phase_ for phase_ in trace.phases() if trace.steps_of(phase_) and phase in (None, phase_)]
        parts += [_per_step(trace, phase_) for phase_ in phases]
    if each_step:
        parts.append(_steps([step for step in trace.steps if phase in (None, step.phase)]))
    kernels = [kernel for kernel in trace.kernels if phase in (None, kernel.phase)]
    parts.append(_kernels(kernels, top, trace.on))
    parts.append(_unknown([kernel for kernel in kernels if kernel.op_class == "unknown"], trace))
    return "\n\n".join(filter(None, parts)) + "\n"


def _head(trace: Trace) -> Iterator[str]:
    profiler = {"torch": "torch.profiler", "rocprof": "rocprof", "nsys": "nsys stats"}[trace.source]
    rank = f", rank {trace.rank} of {trace.world_size}" if trace.rank is not None and trace.world_size else ""
    partial = "; BROKEN OFF: sums and shares are of a part only" if trace.partial else ""
    engine = f" of {trace.engine}" if trace.engine else ""
    yield f"{trace.path}: {profiler}{engine}{rank}{partial}"
    if trace.on == "cpu":
        yield "no kernels in it: operators on the CPU, each without those inside it"
    for device in trace.devices:
        yield from _device(device, trace.on)
    for phase, why, count in trace.evidence():
        yield f"{count} {phase} step{'s' * (count != 1)}, by {why}"
    for finding in trace.findings:
        yield f"{finding.severity}: {finding.message}"


def _device(device: Device, on: str) -> Iterator[str]:
    what, where = ("kernel or copy", "stream") if on == "gpu" else ("operator", "thread")
    if device.calls != 1:
        what = "kernels and copies" if on == "gpu" else "operators"
    model = f" ({device.model})" if device.model else ""
    plural = "s" if device.streams != 1 else ""
    yield (
        f"device {device.name}{model}: {device.calls} {what} on {device.streams} {where}{plural}; "
        f"sum {_us(device.sum_ns)} in a span of {_us(device.span_ns)}: busy {_us(device.busy_ns)}, "
        f"overlapped {_us(device.sum_ns - device.busy_ns)}, idle {_us(device.idle_ns)} "
        f"({_us(device.idle_between_ns)} of it outside of steps)"
    )
    if device.communication_ns:
        yield (
            f"  communication runs for {_us(device.communication_ns)}, "
            f"{_us(device.exposed_communication_ns)} of it exposed: no computation covers it"
        )


def _classes(trace: Trace, phase: Phase | None) -> str:
    total = trace.time_ns(phase)
    alone: dict[str, int] = {}
    for row in trace.classes:
        if phase in (None, row.phase):
            alone[row.op_class] = alone.get(row.op_class, 0) + row.alone_ns
    by_class = trace.by_class(phase)
    rows = [
        [name, _us(times.time_ns), _percent(times.time_ns, total), times.calls, _us(times.exposed_ns),
         _percent(times.exposed_ns, times.time_ns), _us(alone[name])]
        for name, times in by_class.items()
    ]  # fmt: skip
    calls, exposed = sum(t.calls for t in by_class.values()), sum(t.exposed_ns for t in by_class.values())
    rows.append(["sum", _us(total), "100.0 %", calls, _us(exposed), _percent(exposed, total), ""])
    title = f"of {phase} steps" if phase else "of the whole trace"
    return f"{title}\n" + _table(rows, ["class", "time", "share", "calls", "exposed", "w", "alone"])


def _per_step(trace: Trace, phase: Phase) -> str:
    steps = trace.steps_of(phase)
    span, idle = statistics.median(s.span_ns for s in steps), statistics.median(s.idle_ns for s in steps)
    periods = [step.period_ns for step in steps if step.period_ns is not None]
    period = f", {_us(statistics.median(periods))} from start to start" if periods else ""
    names = dict.fromkeys((*trace.by_class(phase), "host"))
    classes = [
        (name, per_step)
        for name in names
        if (per_step := trace.per_step(name, phase)) and per_step.exposed_us
    ]
    classes.sort(key=lambda per_step: -per_step[1].time_us)
    total = sum(per_step.time_us for _, per_step in classes)
    rows = [
        [
            name,
            microseconds(per_step.time_us),
            _percent(per_step.time_us, total),
            f"{per_step.calls:g}",
            microseconds(per_step.exposed_us),
            _range(per_step),
        ]
        for name, per_step in classes
    ]
    return (
        f"a {phase} step: median of {len(steps)}; {_us(span)} long, {_us(idle)} of it idle{period}\n"
        + _table(rows, ["class", "time", "share", "calls", "exposed", "time, least..most"])
    )


def _range(per_step: PerStep) -> str:
    return (
        f"{microseconds(min(per_step.each_time_us))}..{microseconds(max(per_step.each_time_us))}"
        if per_step.steps > 1
        else ""
    )


def _steps(steps: Sequence[TraceStep]) -> str:
    rows = [
        [step.name[:50], step.device, step.phase, _us(step.start_ns), _us(step.span_ns),
         _us(step.time_ns), _us(step.idle_ns), _us(step.period_ns) if step.period_ns is not None else ""]
        for step in steps[:STEPS]
    ]  # fmt: skip
    more = f"\nand {len(steps) - STEPS} more (--json has all)" if len(steps) > STEPS else ""
    return _table(rows, ["step", "device", "phase", "start", "span", "sum", "idle", "to the next"]) + more


def _kernels(kernels: Sequence[KernelTime], top: int, on: str) -> str:
    if not top or not kernels:
        return ""
    total = sum(kernel.time_ns for kernel in kernels)
    rows = [
        [_short(k.name), k.op_class, k.phase, _us(k.time_ns), _percent(k.time_ns, total), k.calls,
         _us(k.time_ns / max(k.calls, 1)), k.shapes[0].dims[:60] if k.shapes else ""]
        for k in kernels[:top]
    ]  # fmt: skip
    what = "kernel" if on == "gpu" else "operator"
    headers = [what, "class", "phase", "time", "share", "calls", "a call", "shapes of the most time"]
    more = f"\nand {len(kernels) - top} more (--top, --json)" if len(kernels) > top else ""
    return _table(rows, headers) + more


def _unknown(kernels: Sequence[KernelTime], trace: Trace) -> str:
    if not kernels:
        return "unknown: none"
    total = trace.time_ns() or 1
    time, calls = sum(k.time_ns for k in kernels), sum(k.calls for k in kernels)
    lines = [f"  {_us(k.time_ns):>10}  {k.calls:>6} calls  {_short(k.name)}" for k in kernels]
    return "\n".join(
        [
            f"unknown: {len(kernels)} names, {calls} calls, {_us(time)}, {time / total:.2%} of the trace",
            *lines,
        ]
    )


def as_json(trace: Trace, phase: Phase | None = None) -> dict[str, Any]:
    """Everything, times in microseconds."""
    return {
        "trace": {
            "path": trace.path,
            "source": trace.source,
            "on": trace.on,
            "engine": trace.engine,
            "rank": trace.rank,
            "world_size": trace.world_size,
            "partial": trace.partial,
            "time_us": trace.time_ns() / 1e3,
            "devices": [_device_json(device) for device in trace.devices],
            "phases": [
                {"phase": phase_, "steps": count, "evidence": why} for phase_, why, count in trace.evidence()
            ],
            "events": dict(trace.categories),
            "findings": [finding.model_dump() for finding in trace.findings],
        },
        "classes": [
            {
                "class": row.op_class,
                "phase": row.phase,
                **_times_json(row),
                "share": row.time_ns / (trace.time_ns(row.phase) or 1),
                "alone_us": row.alone_ns / 1e3,
                "per_step": _per_step_json(trace.per_step(row.op_class, row.phase)),
            }
            for row in trace.classes
            if phase in (None, row.phase)
        ],
        "kernels": [_kernel_json(k) for k in trace.kernels if phase in (None, k.phase)],
        "steps": [_step_json(step) for step in trace.steps if phase in (None, step.phase)],
        "unknown": [
            {"name": k.name, "calls": k.calls, "time_us": k.time_us, "phase": k.phase, "op": k.op}
            for k in trace.unknown()
            if phase in (None, k.phase)
        ],
    }


def _times_json(times: Times) -> dict[str, Any]:
    return {
        "calls": times.calls,
        "time_us": times.time_us,
        "exposed_us": times.exposed_us,
        "exposure": times.exposure,
    }


def _per_step_json(per_step: PerStep | None) -> dict[str, Any] | None:
    if per_step is None:
        return None
    return {
        "steps": per_step.steps,
        "calls": per_step.calls,
        "time_us": per_step.time_us,
        "exposed_us": per_step.exposed_us,
    }


def _device_json(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "model": device.model,
        "streams": device.streams,
        "calls": device.calls,
        "span_us": device.span_ns / 1e3,
        "busy_us": device.busy_ns / 1e3,
        "sum_us": device.sum_ns / 1e3,
        "overlapped_us": (device.sum_ns - device.busy_ns) / 1e3,
        "idle_us": device.idle_ns / 1e3,
        "idle_between_steps_us": device.idle_between_ns / 1e3,
        "communication_us": device.communication_ns / 1e3,
        "exposed_communication_us": device.exposed_communication_ns / 1e3,
    }


def _kernel_json(kernel: KernelTime) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "class": kernel.op_class,
        "library": kernel.library,
        "phase": kernel.phase,
        "op": kernel.op,
        **_times_json(kernel),
        "shapes": [{"dims": s.dims, "calls": s.calls, "time_us": s.time_ns / 1e3} for s in kernel.shapes],
    }


def _step_json(step: TraceStep) -> dict[str, Any]:
    return {
        "name": step.name,
        "device": step.device,
        "phase": step.phase,
        "evidence": step.evidence,
        "start_us": step.start_ns / 1e3,
        "span_us": step.span_ns / 1e3,
        "time_us": step.time_ns / 1e3,
        "idle_us": step.idle_ns / 1e3,
        "period_us": step.period_ns / 1e3 if step.period_ns is not None else None,
        "classes": {name: _times_json(times) for name, times in step.classes.items()},
    }


def _short(name: str) -> str:
    """A kernel's name, its middle left out where it is long: what tells stands at both ends."""
    name = name.removeprefix("void ")
    return name if len(name) <= NAME else f"{name[: NAME - 23]}...{name[-20:]}"


def _us(ns: float) -> str:
    return microseconds(ns / 1e3)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    words = ("class", "kernel", "operator", "phase", "step", "device", "shapes of the most time")
    return table(rows, headers, right=[header for header in headers if header not in words])
