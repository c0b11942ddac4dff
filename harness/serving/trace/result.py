"""The decomposed trace, which `harness.serving.trace.decompose` gives, as text and as JSON.

Times are of the whole trace, of all its devices together, unless a field says otherwise.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.report.text import microseconds, table
from harness.serving.schema import Finding
from harness.serving.trace.classify import PHASES, Phase

NAME = 90  # characters of a kernel's name


@dataclass(frozen=True)
class Times:
    """time_ns:    sum of durations
    exposed_ns: of it, what is on the critical path: time in which anything computes belongs to what computes,
                in equal parts; communication has what no computation covers. All sum to the busy time
    """

    calls: float
    time_ns: float
    exposed_ns: float

    @property
    def exposure(self) -> float | None:
        """The part of the time that is on the critical path, in [0, 1]; None where there is no time."""
        return min(self.exposed_ns / self.time_ns, 1.0) if self.time_ns else None


@dataclass(frozen=True)
class ClassTime(Times):
    """An op class in the steps of one phase."""

    op_class: str
    phase: Phase


@dataclass(frozen=True)
class ShapeTime:
    """dims: the inputs of the operator that launched the kernel, as the profiler recorded them."""

    dims: str
    calls: float
    time_ns: float


@dataclass(frozen=True)
class KernelTime(Times):
    """A kernel (on CPU traces an operator, without those inside it) in the steps of one phase.

    library: the library that has it, by its name; empty if unknown
    op:      the operator whose launches of it took the most time; empty if none is known (in graphs)
    shapes:  most time first; empty where none were recorded
    """

    name: str
    op_class: str
    library: str
    phase: Phase
    op: str
    shapes: tuple[ShapeTime, ...]


@dataclass(frozen=True)
class TraceStep:
    """One step on one device.

    evidence:  how its bounds and its phase were found
    start_ns:  from the start of the first kernel of the trace on
    span_ns:   from its first kernel's start to its last one's end
    idle_ns:   of it, with nothing running: the device waits, mostly for the host
    period_ns: to the start of the next step; None for the last
    classes:   its times by class
    """

    name: str
    device: str
    phase: Phase
    evidence: str
    start_ns: int
    span_ns: int
    idle_ns: int
    period_ns: int | None
    classes: Mapping[str, Times]

    def times(self, op_class: str) -> Times:
        """Those of a class; `host` with the idle time, so that all that is exposed sums to the span."""
        of = self.classes.get(op_class, Times(0, 0, 0.0))
        idle = self.idle_ns if op_class == "host" else 0
        return Times(of.calls, of.time_ns + idle, of.exposed_ns + idle)


@dataclass(frozen=True)
class Device:
    """busy_ns: the union of all it ran; sum_ns: the sum, with what overlaps counted twice.

    idle_ns:  span without busy; idle_between_steps_ns: of it, between steps or outside of them
    communication_ns: the union of communication; exposed: of it, what no computation covers
    """

    name: str
    model: str
    streams: int
    calls: int
    span_ns: int
    busy_ns: int
    sum_ns: int
    idle_between_steps_ns: int
    communication_ns: int
    exposed_communication_ns: int

    @property
    def idle_ns(self) -> int:
        return self.span_ns - self.busy_ns


@dataclass(frozen=True)
class PerStep(Times):
    """A class in the steps of a phase: medians over the steps. each_time_ns: of each step"""

    steps: int
    each_time_ns: tuple[float, ...]


@dataclass(frozen=True)
class Trace:
    """on:         where the work ran; `cpu`: operators' own time, as the trace has no kernels
    engine:     the one that ran it, empty where nothing tells
    partial:    the file breaks off, and what came before was taken
    categories: how many events of each category the file has
    """

    path: str
    source: Literal["torch", "rocprof", "nsys"]
    on: Literal["gpu", "cpu"]
    engine: str
    rank: int | None
    world_size: int | None
    partial: bool
    devices: tuple[Device, ...]
    classes: tuple[ClassTime, ...]
    kernels: tuple[KernelTime, ...]
    steps: tuple[TraceStep, ...]
    categories: Mapping[str, int]
    findings: tuple[Finding, ...]

    def phases(self) -> tuple[Phase, ...]:
        """Those that have kernels."""
        return tuple(phase for phase in PHASES if any(row.phase == phase for row in self.classes))

    def by_class(self, phase: Phase | None = None) -> dict[str, Times]:
        """Times by class, of one phase or all; most time first."""
        sums: dict[str, Times] = {}
        for row in self.classes:
            if phase in (None, row.phase):
                of = sums.get(row.op_class, Times(0, 0, 0.0))
                sums[row.op_class] = Times(
                    of.calls + row.calls, of.time_ns + row.time_ns, of.exposed_ns + row.exposed_ns
                )
        return dict(sorted(sums.items(), key=lambda item: -item[1].time_ns))

    def time_ns(self, phase: Phase | None = None) -> float:
        """The sum of all durations; the classes sum to it."""
        return sum(row.time_ns for row in self.classes if phase in (None, row.phase))

    def steps_of(self, phase: Phase) -> tuple[TraceStep, ...]:
        return tuple(step for step in self.steps if step.phase == phase)

    def per_step(self, op_class: str, phase: Phase) -> PerStep | None:
        """Time of a class in a step of the phase; None where there is no such step. `host` has the time in
        which the device is idle within the step."""
        times = [step.times(op_class) for step in self.steps_of(phase)]
        if not times:
            return None
        median = statistics.median
        return PerStep(
            calls=median(each.calls for each in times),
            time_ns=median(each.time_ns for each in times),
            exposed_ns=median(each.exposed_ns for each in times),
            steps=len(times),
            each_time_ns=tuple(each.time_ns for each in times),
        )

    def evidence(self) -> Iterator[tuple[Phase, str, int]]:
        """(phase, evidence, how many steps)."""
        for (phase, why), count in Counter((s.phase, s.evidence) for s in self.steps).most_common():
            yield phase, why, count


# As text


def as_text(trace: Trace, phase: Phase | None, top: int) -> str:
    """phase: of which steps only; top: how many kernels."""
    parts = ["\n".join(_head(trace)), _classes(trace, phase)]
    if len(trace.steps) > 1:
        phases = [each for each in trace.phases() if trace.steps_of(each) and phase in (None, each)]
        parts += [_per_step(trace, each) for each in phases]
    kernels = [kernel for kernel in trace.kernels if phase in (None, kernel.phase)]
    parts.append(_kernels(kernels, top, trace.on))
    parts.append(_unknown(kernels, trace.time_ns()))
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
    by_class = trace.by_class(phase)
    total = trace.time_ns(phase)
    calls, exposed = (sum(getattr(t, name) for t in by_class.values()) for name in ("calls", "exposed_ns"))
    rows = [
        [name, _us(times.time_ns), _percent(times.time_ns, total), times.calls, _us(times.exposed_ns),
         _percent(times.exposed_ns, times.time_ns)]
        for name, times in (by_class | {"sum": Times(calls, total, exposed)}).items()
    ]  # fmt: skip
    title = f"of {phase} steps" if phase else "of the whole trace"
    return f"{title}\n" + _table(rows, ["class", "time", "share", "calls", "exposed", "of its time"])


def _per_step(trace: Trace, phase: Phase) -> str:
    steps = trace.steps_of(phase)
    span, idle = statistics.median(s.span_ns for s in steps), statistics.median(s.idle_ns for s in steps)
    periods = [step.period_ns for step in steps if step.period_ns is not None]
    period = f", {_us(statistics.median(periods))} from start to start" if periods else ""
    names = dict.fromkeys((*trace.by_class(phase), "host"))
    classes = {name: times for name in names if (times := trace.per_step(name, phase)) and times.exposed_ns}
    total = sum(times.time_ns for times in classes.values())
    rows = [
        [name, _us(times.time_ns), _percent(times.time_ns, total), f"{times.calls:g}", _us(times.exposed_ns),
         f"{_us(min(times.each_time_ns))}..{_us(max(times.each_time_ns))}" if times.steps > 1 else ""]
        for name, times in sorted(classes.items(), key=lambda item: -item[1].time_ns)
    ]  # fmt: skip
    return (
        f"{phase} step: median of {len(steps)}; {_us(span)} long, {_us(idle)} of it idle{period}\n"
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


def _unknown(kernels: Sequence[KernelTime], total: float) -> str:
    kernels = [kernel for kernel in kernels if kernel.op_class == "unknown"]
    if not kernels:
        return "unknown: none"
    time, calls = sum(k.time_ns for k in kernels), sum(k.calls for k in kernels)
    head = (
        f"unknown: {len(kernels)} names, {calls} calls, {_us(time)}, {time / (total or 1):.2%} of the trace"
    )
    lines = [f"  {_us(k.time_ns):>10}  {k.calls:>6} calls  {_short(k.name)}" for k in kernels]
    return "\n".join([head, *lines])


def _short(name: str) -> str:
    """A kernel's name; of a long one the middle is left out, as both ends tell most."""
    name = name.removeprefix("void ")
    return name if len(name) <= NAME else f"{name[: NAME - 23]}...{name[-20:]}"


def _us(ns: float) -> str:
    return microseconds(ns / 1e3)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    words = ("class", "kernel", "operator", "phase", "shapes of the most time")
    return table(rows, headers, right=[header for header in headers if header not in words])


# As JSON


def as_json(trace: Trace, phase: Phase | None = None) -> dict[str, Any]:
    """Everything, times in microseconds. phase: of its steps only."""
    classes = []
    for row in trace.classes:
        share = row.time_ns / (trace.time_ns(row.phase) or 1)
        per_step = trace.per_step(row.op_class, row.phase)
        steps = None if per_step is None else _in_us(per_step, "each_time_ns")
        classes.append(_times(row) | {"share": share, "per_step": steps})
    kernels = [
        _times(kernel) | {"shapes": [_in_us(shape) for shape in kernel.shapes]} for kernel in trace.kernels
    ]
    steps_ = [
        _in_us(step) | {"time_us": sum(times.time_ns for times in step.classes.values()) / 1e3,
                        "classes": {name: _times(times) for name, times in step.classes.items()}}
        for step in trace.steps
    ]  # fmt: skip
    classes, kernels, steps_ = (
        [row for row in rows if phase in (None, row["phase"])] for rows in (classes, kernels, steps_)
    )
    return {
        "trace": _in_us(trace, "classes", "kernels", "steps", "categories")
        | {
            "time_us": trace.time_ns() / 1e3,
            "devices": [
                _in_us(each)
                | {"overlapped_us": (each.sum_ns - each.busy_ns) / 1e3, "idle_us": each.idle_ns / 1e3}
                for each in trace.devices
            ],
            "phases": [
                {"phase": each, "steps": count, "evidence": why} for each, why, count in trace.evidence()
            ],
            "events": dict(trace.categories),
            "findings": [finding.model_dump() for finding in trace.findings],
        },
        "classes": classes,
        "kernels": kernels,
        "steps": steps_,
        "unknown": [kernel for kernel in kernels if kernel["class"] == "unknown"],
    }


def _times(times: Times) -> dict[str, Any]:
    return _in_us(times, "shapes") | {"exposure": times.exposure}


def _in_us(record: Any, *without: str) -> dict[str, Any]:
    """A record's fields: `X_ns` as `X_us`, `op_class` as `class`."""
    fields = {}
    for name, value in vars(record).items():
        if name in without:
            continue
        if name.endswith("_ns"):
            fields[name.removesuffix("_ns") + "_us"] = None if value is None else value / 1e3
        else:
            fields["class" if name == "op_class" else name] = value
    return fields
