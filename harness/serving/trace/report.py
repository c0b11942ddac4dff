"""A decomposed trace as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from harness.report.text import microseconds, table
from harness.serving.trace.classify import Phase
from harness.serving.trace.result import Device, KernelTime, Times, Trace

NAME = 90  # characters of a kernel's name


def as_text(trace: Trace, phase: Phase | None, top: int) -> str:
    """What a person reads. phase: of which steps only; top: how many kernels."""
    parts = ["\n".join(_head(trace)), _classes(trace, phase)]
    if len(trace.steps) > 1:
        phases = [phase_ for phase_ in trace.phases() if trace.steps_of(phase_) and phase in (None, phase_)]
        parts += [_per_step(trace, phase_) for phase_ in phases]
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
        f"({_us(device.idle_between_steps_ns)} of it outside of steps)"
    )
    if device.communication_ns:
        yield (
            f"  communication runs for {_us(device.communication_ns)}, "
            f"{_us(device.exposed_communication_ns)} of it exposed: no computation covers it"
        )


def _classes(trace: Trace, phase: Phase | None) -> str:
    total = trace.time_ns(phase)
    by_class = trace.by_class(phase)
    rows = [
        [name, _us(times.time_ns), _percent(times.time_ns, total), times.calls, _us(times.exposed_ns),
         _percent(times.exposed_ns, times.time_ns)]
        for name, times in by_class.items()
    ]  # fmt: skip
    calls, exposed = sum(t.calls for t in by_class.values()), sum(t.exposed_ns for t in by_class.values())
    rows.append(["sum", _us(total), "100.0 %", calls, _us(exposed), _percent(exposed, total)])
    title = f"of {phase} steps" if phase else "of the whole trace"
    return f"{title}\n" + _table(rows, ["class", "time", "share", "calls", "exposed", "w"])


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
            "..".join(microseconds(end(per_step.each_time_us)) for end in (min, max))
            if len(steps) > 1
            else "",
        ]
        for name, per_step in classes
    ]
    return (
        f"a {phase} step: median of {len(steps)}; {_us(span)} long, {_us(idle)} of it idle{period}\n"
        + _table(rows, ["class", "time", "share", "calls", "exposed", "time, least..most"])
    )


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
    classes = []
    for row in trace.classes:
        if phase in (None, row.phase):
            share = row.time_ns / (trace.time_ns(row.phase) or 1)
            per_step = trace.per_step(row.op_class, row.phase)
            steps = None if per_step is None else _in_us(per_step, "each_time_us")
            classes.append(_times(row) | {"share": share, "per_step": steps})
    head = _in_us(trace, "classes", "kernels", "steps", "categories")
    return {
        "trace": head
        | {
            "time_us": trace.time_ns() / 1e3,
            "devices": [
                _in_us(each)
                | {"overlapped_us": (each.sum_ns - each.busy_ns) / 1e3, "idle_us": each.idle_ns / 1e3}
                for each in trace.devices
            ],
            "phases": [
                {"phase": phase_, "steps": count, "evidence": why} for phase_, why, count in trace.evidence()
            ],
            "events": dict(trace.categories),
            "findings": [finding.model_dump() for finding in trace.findings],
        },
        "classes": classes,
        "kernels": [
            _times(kernel) | {"shapes": [_in_us(shape) for shape in kernel.shapes]}
            for kernel in trace.kernels
            if phase in (None, kernel.phase)
        ],
        "steps": [
            _in_us(step)
            | {"time_us": step.time_ns / 1e3, "classes": {n: _times(t) for n, t in step.classes.items()}}
            for step in trace.steps
            if phase in (None, step.phase)
        ],
        "unknown": [_times(kernel) for kernel in trace.unknown() if phase in (None, kernel.phase)],
    }


def _times(times: Times) -> dict[str, Any]:
    return _in_us(times, "shapes") | {"exposure": times.exposure}


def _in_us(record: Any, *without: str) -> dict[str, Any]:
    """A record's fields: `X_ns` as `X_us`, `op_class` as `class`."""
    fields = {}
    for name, value in vars(record).items():
        if name.endswith("_ns"):
            fields[name.removesuffix("_ns") + "_us"] = None if value is None else value / 1e3
        elif name not in without:
            fields["class" if name == "op_class" else name] = value
    return fields


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
