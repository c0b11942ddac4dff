"""Decomposition of a trace into classes, kernels, steps and exposure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.serving.op_classes import COMMUNICATION, OP_CLASSES
from harness.serving.schema import Finding
from harness.serving.trace.classify import PHASES, KernelRule, attention_class, engine_of, rule_of
from harness.serving.trace.columns import NONE, RecordedTrace, groups
from harness.serving.trace.read import read
from harness.serving.trace.result import ClassTime, Device, KernelTime, ShapeTime, Times, Trace, TraceStep
from harness.serving.trace.steps import TraceSteps, find_steps
from harness.serving.trace.work import LaunchedWork, kernels, operators

CLASSES = tuple(OP_CLASSES)
LATENT = re.compile(r"(?<![A-Za-z])mla(?![a-z])|MLA|(?<=[a-z])Mla(?![a-z])")
"""In the name of a kernel or operator: the model's attention is over a latent cache."""
SHAPES = 5  # of a kernel, those with the most time


def decompose(path: str | Path, *, partial: bool = False) -> Trace:
    """Takes a trace of torch.profiler or rocprofv3 apart; plain or gzip. partial: of a file that breaks off,
    what there is, flagged. Raises UnreadableError.

    Kernels and copies count where there are any; else operators of CPU threads, each without those inside it.
    """
    recorded = read(Path(path), partial=partial)
    work = kernels(recorded) if len(recorded.work) else operators(recorded)
    rules, rule = _rules(recorded, work)
    steps = find_steps(recorded, work, rules, rule, Path(path).name)
    return _Sums(recorded, work, rules, rule, steps).trace(str(path))


def _names(recorded: RecordedTrace, numbers: np.ndarray) -> list[str]:
    """Each once."""
    names = recorded.names.all()
    return [names[i] for i in np.unique(numbers).tolist()]


def _rules(recorded: RecordedTrace, work: LaunchedWork) -> tuple[list[KernelRule], np.ndarray]:
    """The rules that names fit, and the number of each row's in them. An operator is its own launcher."""
    names = recorded.names.all()
    pairs, pair_of = groups(work.name, work.op)
    rules: dict[KernelRule, int] = {}
    numbers = []
    for name, op in pairs:
        launcher = names[op] if op != NONE else names[name]
        numbers.append(rules.setdefault(rule_of(names[name], launcher), len(rules)))
    return list(rules), np.array(numbers)[pair_of]


class _Sums:
    """The sums over rows, by class, kernel, step and device."""

    def __init__(
        self,
        recorded: RecordedTrace,
        work: LaunchedWork,
        rules: Sequence[KernelRule],
        rule: np.ndarray,
        steps: TraceSteps,
    ) -> None:
        self.recorded, self.work, self.rules, self.steps = recorded, work, rules, steps
        latent = any(LATENT.search(name) for name in recorded.names.all())
        classes = np.array(
            [
                [CLASSES.index(attention_class(rule.op_class, phase, latent)) for phase in PHASES]
                for rule in rules
            ]
        )
        of_step = np.array([PHASES.index(phase) for phase in steps.phases] + [PHASES.index("other")])
        self.rule = rule
        self.phase = of_step[steps.of]  # NONE is the last
        self.op_class = classes[rule, self.phase]
        self.length = work.end - work.start
        communication = np.array([name in COMMUNICATION for name in CLASSES])
        self.communicates = communication[self.op_class]
        self.exposed = np.zeros(len(rule))
        self.lines = [np.flatnonzero(work.device == i) for i in range(len(work.devices))]
        self.times = []
        for on_device in self.lines:
            line = Timeline(work.start[on_device], work.end[on_device])
            self.times.append(line)
            self.exposed[on_device] = line.exposed(self.communicates[on_device])

    def trace(self, path: str) -> Trace:
        recorded = self.recorded
        steps, idle_between = self._steps()
        return Trace(
            path=path,
            source=recorded.source,
            on=self.work.on,
            engine=engine_of(*(_names(recorded, each.name) for each in (recorded.ops, recorded.spans))),
            rank=recorded.rank,
            world_size=recorded.world_size,
            partial=recorded.truncated,
            devices=tuple(self._device(i, idle_between[i]) for i in range(len(self.lines))),
            classes=tuple(self._classes()),
            kernels=tuple(self._kernels()),
            steps=tuple(steps),
            categories=dict(recorded.categories),
            findings=(*recorded.findings, *self._missing(), *_cut(steps)),
        )

    def _sum(self, *columns: np.ndarray) -> list[tuple[tuple[int, ...], Times]]:
        """(numbers, times) of the rows that have the same numbers in these columns; most time first."""
        keys, of = groups(*columns)
        calls = np.bincount(of, self.work.calls, len(keys)).astype(int)
        exposed = np.bincount(of, self.exposed, len(keys))
        time = np.zeros(len(keys), dtype=np.int64)
        np.add.at(time, of, self.length)
        return [
            (keys[i], Times(int(calls[i]), int(time[i]), float(exposed[i])))
            for i in np.argsort(-time, kind="stable").tolist()
        ]

    def _classes(self) -> Iterator[ClassTime]:
        for (op_class, phase), times in self._sum(self.op_class, self.phase):
            yield ClassTime(**vars(times), op_class=CLASSES[op_class], phase=PHASES[phase])

    def _kernels(self) -> Iterator[KernelTime]:
        names, texts, work = self.recorded.names.all(), self.recorded.shapes.all(), self.work
        which = (self.op_class, self.phase, work.name, self.rule)
        shapes: dict[tuple[int, ...], list[ShapeTime]] = {}
        for (*kernel, shape), times in self._sum(*which, work.shapes):
            if shape != NONE:
                shape_time = ShapeTime(texts[shape], times.calls, times.time_ns)
                shapes.setdefault(tuple(kernel), []).append(shape_time)
        ops: dict[tuple[int, ...], str] = {}
        for (*kernel, op), _ in self._sum(*which, work.op):
            if op != NONE:
                ops.setdefault(tuple(kernel), names[op])
        for columns, times in self._sum(*which):
            op_class, phase, name, rule = columns
            yield KernelTime(
                **vars(times),
                name=names[name],
                op_class=CLASSES[op_class],
                library=self.rules[rule].library,
                phase=PHASES[phase],
                op=ops.get(columns, ""),
                shapes=tuple(shapes.get(columns, [])[:SHAPES]),
            )

    def _steps(self) -> tuple[list[TraceStep], list[int]]:
        """The steps in the order of time, and each device's idle time outside of them."""
        work, steps = self.work, self.steps
        count = len(steps.names)
        trace_steps: list[TraceStep] = []
        idle_between = []
        per_class: dict[tuple[int, int], dict[str, Times]] = {}
        for (device, step, op_class), times in self._sum(work.device, steps.of, self.op_class):
            per_class.setdefault((device, step), {})[CLASSES[op_class]] = times
        origin = int(work.start.min())
        for device, on_device in enumerate(self.lines):
            after, length = gaps(work.start[on_device], work.end[on_device])
            of = steps.of[on_device]
            starts = np.full(count + 1, np.iinfo(np.int64).max)
            ends = np.full(count + 1, np.iinfo(np.int64).min)
            np.minimum.at(starts, of, work.start[on_device])
            np.maximum.at(ends, of, work.end[on_device])
            inside = (of[after] != NONE) & (starts[of[after]] < work.start[on_device][after])
            idle_between.append(int(length[~inside].sum()))
            idle = np.bincount(of[after][inside], length[inside], count)
            there = sorted(set(of[of != NONE].tolist()), key=lambda step: starts[step])
            for place, step in enumerate(there):
                period = int(starts[there[place + 1]] - starts[step]) if place + 1 < len(there) else None
                trace_steps.append(
                    TraceStep(
                        steps.names[step], self._device_name(device), steps.phases[step],
                        steps.evidence[step], int(starts[step]) - origin,
                        int(ends[step] - starts[step]), int(idle[step]), period, per_class[device, step],
                    )
                )  # fmt: skip
        return trace_steps, idle_between

    def _device_name(self, number: int) -> str:
        return str(self.work.devices[number])

    def _device(self, number: int, idle_between: int) -> Device:
        on_device, line, work = self.lines[number], self.times[number], self.work
        communicates = self.communicates[on_device]
        return Device(
            name=self._device_name(number),
            model=self._model(work.devices[number]),
            streams=len(np.unique(work.stream[on_device])),
            calls=int(work.calls[on_device].sum()),
            span_ns=int(work.end[on_device].max() - work.start[on_device].min()),
            busy_ns=line.covered(np.ones(len(on_device), dtype=bool)),
            sum_ns=int(self.length[on_device].sum()),
            idle_between_steps_ns=idle_between,
            communication_ns=line.covered(communicates),
            exposed_communication_ns=round(self.exposed[on_device][communicates].sum()),
        )

    def _model(self, device: Any) -> str:
        """Its name; a device that the head does not list, among others of one name, has that name."""
        names = self.recorded.device_names
        return names.get(device, next(iter(names.values())) if len(set(names.values())) == 1 else "")

    def _missing(self) -> list[Finding]:
        if self.work.on == "cpu" or self.recorded.source == "rocprof" or not len(self.recorded.launches):
            return []
        lost = int((self.work.process == NONE).sum())
        if not lost:
            return []
        message = f"{lost} of {len(self.rule)} kernels and copies have no launch in the trace: in no step"
        return [Finding(rule="no launch", severity="note", message=message)]


def _cut(steps: Sequence[TraceStep]) -> Iterator[Finding]:
    """Steps in which the profiler started or stopped: far fewer calls than others of their phase."""
    for phase in PHASES:
        calls = [
            sum(class_.calls for class_ in step.classes.values()) for step in steps if step.phase == phase
        ]
        few = sum(2 * count < statistics.median(calls) for count in calls)
        if few:
            yield Finding(
                rule="cut step",
                severity="note",
                message=f"{few} of {len(calls)} {phase} steps have less than half of their median's calls: "
                "the profiler began or ended within them, or they are of another kind",
            )


# The critical path over intervals of time: what of a sum of durations is exposed on it


class Timeline:
    """The moments at which anything of one device begins or ends, and what runs between them.

    start, end: int64 [n], ns
    """

    def __init__(self, start: np.ndarray, end: np.ndarray) -> None:
        self.moments = np.unique(np.concatenate([start, end]))
        self.lengths = np.diff(self.moments)
        self._first = np.searchsorted(self.moments, start)
        self._last = np.searchsorted(self.moments, end)

    def running(self, which: np.ndarray) -> np.ndarray:
        """How many of the intervals `which` (bool [n]) run from each moment to the next: [moments - 1]."""
        size = len(self.moments)
        begun = np.bincount(self._first[which], minlength=size)
        ended = np.bincount(self._last[which], minlength=size)
        return np.cumsum(begun - ended)[:-1]

    def covered(self, which: np.ndarray) -> int:
        """Length of the union of the intervals `which`, ns."""
        return int(self.lengths[self.running(which) > 0].sum())

    def exposed(self, communicates: np.ndarray) -> np.ndarray:
        """What each interval has of the time on the critical path: float64 [n], ns; their sum is the union.

        Time in which anything computes belongs to what computes, in equal parts where several do; the rest to
        what communicates. So communication has what no computation covers.
        """
        computing, communicating = self.running(~communicates), self.running(communicates)
        compute = self._part(computing, computing > 0)
        communicate = self._part(communicating, (computing == 0) & (communicating > 0))
        part = np.where(communicates, communicate[self._last] - communicate[self._first], 0.0)
        part[~communicates] = (compute[self._last] - compute[self._first])[~communicates]
        return part

    def _part(self, running: np.ndarray, when: np.ndarray) -> np.ndarray:
        """One interval's part of the time up to each moment: [moments]."""
        each = np.where(when, self.lengths / np.maximum(running, 1), 0.0)
        return np.concatenate([[0.0], np.cumsum(each)])


def gaps(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(after, length) of each stretch in which nothing runs: the number of the interval that begins next,
    and ns. start, end: int64 [n]."""
    order = np.argsort(start, kind="stable")
    length = start[order][1:] - np.maximum.accumulate(end[order])[:-1]
    after = np.flatnonzero(length > 0)
    return order[after + 1], length[after]
