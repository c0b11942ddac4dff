"""The decomposed trace: what `harness.serving.trace.decompose` gives.

Times are of the whole trace, of all its devices together, unless a field says otherwise.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from harness.serving.schema import Finding
from harness.serving.trace.classify import PHASES, Phase


@dataclass(frozen=True)
class Times:
    """time_ns:    sum of durations
    exposed_ns: of it, what is on the critical path: time in which anything computes belongs to what computes,
                in equal parts; communication has what no computation covers. All sum to the busy time
    """

    calls: int
    time_ns: int
    exposed_ns: float

    @property
    def time_us(self) -> float:
        return self.time_ns / 1e3

    @property
    def exposed_us(self) -> float:
        return self.exposed_ns / 1e3

    @property
    def exposure(self) -> float | None:
        """w, in [0, 1]: the part of the time that is on the critical path; None where there is no time."""
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
    calls: int
    time_ns: int


@dataclass(frozen=True)
class KernelTime(Times):
    """A kernel (on CPU traces an operator, without those inside it) in the steps of one phase.

    library: whose it is, by its name; empty if unknown
    op:      the operator whose launches of it took the most time; empty if none is known (in graphs)
    shapes:  most time first; empty where none were recorded
    """

    name: str
    op_class: str
    library: str
    phase: Phase
    op: str
    shapes: tuple[ShapeTime, ...] = ()


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

    @property
    def time_ns(self) -> int:
        return sum(times.time_ns for times in self.classes.values())

    def times(self, op_class: str) -> Times:
        """Those of a class; `host` with the idle time, so that all that is exposed sums to the span."""
        times_ = self.classes.get(op_class, Times(0, 0, 0.0))
        idle = self.idle_ns if op_class == "host" else 0
        return Times(times_.calls, times_.time_ns + idle, times_.exposed_ns + idle)


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
class PerStep:
    """One class in the steps of a phase.

    calls, time_us, exposed_us: medians over the steps
    each_time_us: of each step
    """

    steps: int
    calls: float
    time_us: float
    exposed_us: float
    each_time_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Trace:
    """on: where the work ran; `cpu`: operators' own time, there being no kernels in the trace.

    engine:  that ran it, empty where nothing tells
    partial: the file breaks off, and what came before was taken
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
    categories: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def phases(self) -> tuple[Phase, ...]:
        """Those that there are steps or kernels of."""
        return tuple(p for p in PHASES if any(row.phase == p for row in self.classes))

    def by_class(self, phase: Phase | None = None) -> dict[str, Times]:
        """Times by class, of one phase or all; most time first."""
        sums: dict[str, tuple[int, int, float]] = {}
        for row in self.classes:
            if phase in (None, row.phase):
                calls, time, exposed = sums.get(row.op_class, (0, 0, 0.0))
                sums[row.op_class] = calls + row.calls, time + row.time_ns, exposed + row.exposed_ns
        return {c: Times(*times) for c, times in sorted(sums.items(), key=lambda item: -item[1][1])}

    def time_ns(self, phase: Phase | None = None) -> int:
        """The sum of all durations; the classes sum to it."""
        return sum(row.time_ns for row in self.classes if phase in (None, row.phase))

    def exposure(self, phase: Phase | None = None) -> dict[str, float]:
        """w of the link model, in [0, 1]: the part of each class's time that is on the critical path."""
        exposures = {c: times.exposure for c, times in self.by_class(phase).items()}
        return {c: w for c, w in exposures.items() if w is not None}

    def steps_of(self, phase: Phase) -> tuple[TraceStep, ...]:
        return tuple(step for step in self.steps if step.phase == phase)

    def per_step(self, op_class: str, phase: Phase = "decode") -> PerStep | None:
        """What a class comes to in a step of the phase; None where there is no such step. `host` has the
        time in which the device is idle within the step."""
        times_of_steps = [step.times(op_class) for step in self.steps_of(phase)]
        if not times_of_steps:
            return None
        times = tuple(times_.time_us for times_ in times_of_steps)
        exposed = statistics.median(times_.exposed_us for times_ in times_of_steps)
        calls = statistics.median(times_.calls for times_ in times_of_steps)
        return PerStep(len(times), calls, statistics.median(times), exposed, times)

    def unknown(self) -> tuple[KernelTime, ...]:
        """Kernels that no rule knows."""
        return tuple(kernel for kernel in self.kernels if kernel.op_class == "unknown")

    def evidence(self) -> Iterator[tuple[Phase, str, int]]:
        """(phase, evidence, how many steps)."""
        for (phase, why), count in Counter((s.phase, s.evidence) for s in self.steps).most_common():
            yield phase, why, count
