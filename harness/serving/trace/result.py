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
    """A kernel in the steps of one phase; on CPU traces an operator, without those inside it."""

    name: str
    op_class: str
    library: str  # the one that has it; empty if unknown
    phase: Phase
    op: str  # the operator whose launches of it took the most time; empty if none is known (in graphs)
    shapes: Mapping[str, Times]  # by shapes of the operator's inputs, as recorded; the most time first


@dataclass(frozen=True)
class TraceStep:
    """One step on one device."""

    name: str
    device: str
    phase: Phase
    evidence: str  # how its bounds and its phase were found
    start_ns: int  # from the start of the first kernel of the trace
    span_ns: int  # from the start of its first kernel to the end of its last
    idle_ns: int  # the part of the span in which nothing runs: the device waits, mostly for the host
    period_ns: int | None  # until the start of the next step; None for the last
    time_ns: float  # the sum of its kernels' times
    classes: Mapping[str, Times]  # the same by class

    def times(self, op_class: str) -> Times:
        """The times of a class. `host` includes the idle time, so that all exposed times sum to the span."""
        times = self.classes.get(op_class, NO_TIME)
        return times.plus(Times(0, self.idle_ns, self.idle_ns)) if op_class == "host" else times


@dataclass(frozen=True)
class Device:
    name: str
    model: str
    streams: int
    calls: int
    span_ns: int
    busy_ns: int  # the union of all that it ran
    idle_ns: int  # the rest of the span
    idle_between_steps_ns: int
    sum_ns: int  # the sum of all that it ran
    overlapped_ns: int  # what the sum has beyond the union
    communication_ns: int  # the union of communication
    exposed_communication_ns: int  # what no computation covers of it


@dataclass(frozen=True)
class PerStep(Times):
    """A class in the steps of a phase: medians over the steps."""

    steps: int
    least_and_most: tuple[float, float]  # of time_ns


@dataclass(frozen=True)
class Trace:
    """A decomposed trace."""

    path: str
    source: Literal["torch", "rocprof", "nsys"]
    on: Literal["gpu", "cpu"]  # where the work ran; `cpu`: operators' own time, as the trace has no kernels
    engine: str  # empty if nothing tells it
    rank: int | None
    world_size: int | None
    partial: bool  # whether the file breaks off, so that only what came before was read
    devices: tuple[Device, ...]
    kernels: tuple[KernelTime, ...]
    steps: tuple[TraceStep, ...]
    categories: Mapping[str, int]  # how many events of each category the file has
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
