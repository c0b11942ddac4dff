"""The decomposed trace, which `harness.serving.trace.decompose` returns.

Times are of the whole trace, of all its devices together, unless a field says otherwise.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.serving.schema import Finding
from harness.serving.trace.classify import PHASES, Phase


@dataclass(frozen=True)
class Times:
    """Times of a class or of a kernel.

    time_ns:    sum of durations
    exposed_ns: the part of it on the critical path. Time in which anything computes belongs to what computes,
                in equal parts; communication has what no computation covers. All parts sum to the busy time
    """

    calls: float
    time_ns: float
    exposed_ns: float

    def plus(self, other: Times) -> Times:
        calls, time_ns = self.calls + other.calls, self.time_ns + other.time_ns
        return Times(calls, time_ns, self.exposed_ns + other.exposed_ns)

    @property
    def exposure(self) -> float | None:
        """The share of the time that is on the critical path, in [0, 1]; None if there is no time."""
        return min(self.exposed_ns / self.time_ns, 1.0) if self.time_ns else None


NO_TIME = Times(0, 0, 0.0)


@dataclass(frozen=True)
class KernelTime(Times):
    """A kernel in the steps of one phase; on CPU traces an operator, without those inside it.

    library: the name of the library that has it; empty if unknown
    op:      the operator whose launches of it took the most time; empty if none is known (in graphs)
    shapes:  of the operator's inputs, as the profiler recorded them; those of the most time
    """

    name: str
    op_class: str
    library: str
    phase: Phase
    op: str
    shapes: Mapping[str, Times]


@dataclass(frozen=True)
class TraceStep:
    """One step on one device.

    evidence:  how its bounds and its phase were found
    start_ns:  from the start of the first kernel of the trace
    span_ns:   from the start of its first kernel to the end of its last
    idle_ns:   the part of the span in which nothing runs: the device waits, mostly for the host
    period_ns: until the start of the next step; None for the last
    time_ns:   the sum of its kernels' times; `classes` has those by class
    """

    name: str
    device: str
    phase: Phase
    evidence: str
    start_ns: int
    span_ns: int
    idle_ns: int
    period_ns: int | None
    time_ns: float
    classes: Mapping[str, Times]

    def times(self, op_class: str) -> Times:
        """The times of a class. `host` includes the idle time, so that all exposed times sum to the span."""
        times = self.classes.get(op_class, NO_TIME)
        return times.plus(Times(0, self.idle_ns, self.idle_ns)) if op_class == "host" else times


@dataclass(frozen=True)
class Device:
    """One device.

    busy_ns:          the union of all that it ran; idle_ns: the rest of the span
    sum_ns:           the sum of all that it ran; overlapped_ns: what the sum has beyond the union
    communication_ns: the union of communication; exposed_communication_ns: what no computation covers of it
    """

    name: str
    model: str
    streams: int
    calls: int
    span_ns: int
    busy_ns: int
    idle_ns: int
    idle_between_steps_ns: int
    sum_ns: int
    overlapped_ns: int
    communication_ns: int
    exposed_communication_ns: int


@dataclass(frozen=True)
class PerStep(Times):
    """A class in the steps of a phase: medians over the steps."""

    steps: int
    least_and_most: tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """A decomposed trace.

    on:         where the work ran; `cpu`: operators' own time, as the trace has no kernels
    engine:     empty if nothing tells it
    partial:    whether the file breaks off, so that only what came before was read
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
    kernels: tuple[KernelTime, ...]
    steps: tuple[TraceStep, ...]
    categories: Mapping[str, int]
    findings: tuple[Finding, ...]

    def phases(self) -> tuple[Phase, ...]:
        """The phases that have kernels."""
        return tuple(phase for phase in PHASES if any(row.phase == phase for row in self.kernels))

    def by_class(self, phase: Phase | None = None) -> dict[str, Times]:
        """Times by class, of one phase or all; the most time first."""
        sums: dict[str, Times] = {}
        for row in self.kernels:
            if phase in (None, row.phase):
                sums[row.op_class] = sums.get(row.op_class, NO_TIME).plus(row)
        return dict(sorted(sums.items(), key=lambda item: -item[1].time_ns))

    def time_ns(self, phase: Phase | None = None) -> float:
        """The sum of all durations."""
        return sum(row.time_ns for row in self.kernels if phase in (None, row.phase))

    def steps_of(self, phase: Phase) -> tuple[TraceStep, ...]:
        return tuple(step for step in self.steps if step.phase == phase)

    def per_step(self, op_class: str, phase: Phase) -> PerStep | None:
        """The time of a class in a step of a phase, or None. `host` includes the idle time within steps."""
        rows = [step.times(op_class) for step in self.steps_of(phase)]
        if not rows:
            return None
        calls, times, exposed = zip(*((row.calls, row.time_ns, row.exposed_ns) for row in rows), strict=True)
        median = statistics.median
        return PerStep(median(calls), median(times), median(exposed), len(rows), (min(times), max(times)))

    def evidence(self) -> Iterator[tuple[Phase, str, int]]:
        """Phase, evidence and number of steps."""
        counts = Counter((step.phase, step.evidence) for step in self.steps)
        return ((phase, why, count) for (phase, why), count in counts.most_common())
