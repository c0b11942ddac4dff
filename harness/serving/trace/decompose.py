"""A trace taken apart: classes, kernels, steps, exposure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.serving.op_classes import COMMUNICATION, OP_CLASSES
from harness.serving.trace.intervals import Timeline, gaps
from harness.serving.trace.reading import read
from harness.serving.trace.recorded import NONE, Recorded
from harness.serving.trace.result import ClassTime, Device, KernelTime, ShapeTime, Step, Times, Trace
from harness.serving.trace.rules import PHASES, Rule, attention_class, rule_of
from harness.serving.trace.steps import Rows, Steps, find_steps
from harness.serving.trace.work import Work, kernels, operators

CLASSES = tuple(OP_CLASSES)
SHAPES = 5  # of a kernel, those with the most time


def decompose(path: str | Path, *, partial: bool = False) -> Trace:
    """Takes a trace of torch.profiler or rocprofv3 apart; plain or gzip. partial: of a file that breaks off,
    what there is, flagged. Raises UnreadableError.

    Kernels and copies count where there are any; else operators of CPU threads, each without those inside it.
    """
    recorded = read(Path(path), partial=partial)
    work = kernels(recorded) if len(recorded.work) else operators(recorded)
    rules, rule = _rules(recorded, work)
    steps = find_steps(
        recorded,
        Rows(rules, rule, work.device, work.start, work.at, work.process, work.graph),
        Path(path).name,
    )
    return _Sums(recorded, work, rules, rule, steps).trace(str(path))


def _rules(recorded: Recorded, work: Work) -> tuple[list[Rule], np.ndarray]:
    """The rules that names fit, and the number of each row's in them. An operator is its own launcher."""
    names = recorded.names.all()
    pairs, pair_of = np.unique(np.stack([work.name, work.op], axis=1), axis=0, return_inverse=True)
    rules: dict[Rule, int] = {}
    numbers = []
    for name, op in pairs.tolist():
        launcher = names[op] if op != NONE else names[name]
        numbers.append(rules.setdefault(rule_of(names[name], launcher), len(rules)))
    return list(rules), np.array(numbers)[pair_of.reshape(-1)]


class _Sums:
    """The sums over rows, by class, kernel, step and device."""

    def __init__(
        self, recorded: Recorded, work: Work, rules: Sequence[Rule], rule: np.ndarray, steps: Steps
    ) -> None:
        self.recorded, self.work, self.rules, self.steps = recorded, work, rules, steps
        latent = any("mla" in name.lower() for name in recorded.names.all())
        classes = np.array(
            [
                [CLASSES.index(attention_class(one.op_class, phase, latent)) for phase in PHASES]
                for one in rules
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
        self.group = self.op_class * len(PHASES) + self.phase
        self.alone: dict[int, int] = {}
        self.lines = [np.flatnonzero(work.device == i) for i in range(len(work.devices))]
        self.times = []
        for mine in self.lines:
            line = Timeline(work.start[mine], work.end[mine])
            self.times.append(line)
            self.exposed[mine] = line.exposed(self.communicates[mine])
            for group, alone in line.alone(self.group[mine]).items():
                self.alone[group] = self.alone.get(group, 0) + alone

    def trace(self, path: str) -> Trace:
        recorded = self.recorded
        steps, idle_between = self._steps()
        return Trace(
            path=path,
            source=recorded.source,
            on=self.work.on,
            rank=recorded.rank,
            world_size=recorded.world_size,
            partial=recorded.truncated,
            devices=tuple(self._device(i, idle_between[i]) for i in range(len(self.lines))),
            classes=tuple(self._classes()),
            kernels=tuple(self._kernels()),
            steps=tuple(steps),
            categories=dict(recorded.categories),
            findings=(*recorded.findings, *self._missing()),
        )

    def _sum(self, key: np.ndarray) -> list[tuple[int, Times]]:
        """(key, times) of the rows of each key."""
        keys, of = np.unique(key, return_inverse=True)
        of = of.reshape(-1)
        calls = np.bincount(of, self.work.calls, len(keys))
        exposed = np.bincount(of, self.exposed, len(keys))
        time = np.zeros(len(keys), dtype=np.int64)
        np.add.at(time, of, self.length)
        return [
            (k, Times(int(c), t, e))
            for k, c, t, e in zip(keys.tolist(), calls, time.tolist(), exposed.tolist(), strict=True)
        ]

    def _classes(self) -> list[ClassTime]:
        rows = []
        for group, times in self._sum(self.group):
            op_class, phase = divmod(group, len(PHASES))
            rows.append(
                ClassTime(times.calls, times.time_ns, times.exposed_ns, CLASSES[op_class], PHASES[phase],
                          self.alone[group])
            )  # fmt: skip
        return sorted(rows, key=lambda row: -row.time_ns)

    def _kernels(self) -> list[KernelTime]:
        names, work = self.recorded.names.all(), self.work
        key = (self.group * len(names) + work.name) * len(self.rules) + self.rule
        shapes, ops = self._shapes(key), self._ops(key)
        rows = []
        for number, times in self._sum(key):
            rest, rule = divmod(number, len(self.rules))
            group, name = divmod(rest, len(names))
            op_class, phase = divmod(group, len(PHASES))
            rows.append(
                KernelTime(
                    times.calls, times.time_ns, times.exposed_ns, names[name], CLASSES[op_class],
                    self.rules[rule].library, PHASES[phase], ops.get(number, ""), shapes.get(number, ()),
                )
            )  # fmt: skip
        return sorted(rows, key=lambda row: -row.time_ns)

    def _shapes(self, key: np.ndarray) -> dict[int, tuple[ShapeTime, ...]]:
        texts, work = self.recorded.shapes.all(), self.work
        known = np.flatnonzero(work.shapes != NONE)
        found: dict[int, list[ShapeTime]] = {}
        if not len(known):
            return {}
        pairs, of = np.unique(np.stack([key[known], work.shapes[known]], axis=1), axis=0, return_inverse=True)
        of = of.reshape(-1)
        calls = np.bincount(of, work.calls[known], len(pairs))
        time = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(time, of, self.length[known])
        for (number, shape), count, total in zip(pairs.tolist(), calls, time.tolist(), strict=True):
            found.setdefault(number, []).append(ShapeTime(texts[shape], int(count), total))
        return {n: tuple(sorted(s, key=lambda one: -one.time_ns)[:SHAPES]) for n, s in found.items()}

    def _ops(self, key: np.ndarray) -> dict[int, str]:
        names, work = self.recorded.names.all(), self.work
        known = np.flatnonzero(work.op != NONE)
        pairs, counts = np.unique(np.stack([key[known], work.op[known]], axis=1), axis=0, return_counts=True)
        return {pairs[i][0]: names[pairs[i][1]] for i in np.argsort(counts, kind="stable")}

    def _steps(self) -> tuple[list[Step], list[int]]:
        """The steps in the order of time, and each device's idle time outside of them."""
        work, steps = self.work, self.steps
        count = len(steps.names)
        found: list[Step] = []
        idle_between = []
        per_class = {}
        for number, times in self._sum(
            (work.device * (count + 1) + steps.of + 1) * len(CLASSES) + self.op_class
        ):
            step, op_class = divmod(number, len(CLASSES))
            per_class.setdefault(step, {})[CLASSES[op_class]] = times
        for device, mine in enumerate(self.lines):
            before, after, length = gaps(work.start[mine], work.end[mine])
            of = steps.of[mine]
            inside = (of[before] == of[after]) & (of[after] != NONE)
            idle_between.append(int(length[~inside].sum()))
            idle = np.bincount(of[after][inside], length[inside], count)
            starts = np.full(count + 1, np.iinfo(np.int64).max)
            ends = np.full(count + 1, np.iinfo(np.int64).min)
            np.minimum.at(starts, of, work.start[mine])
            np.maximum.at(ends, of, work.end[mine])
            there = sorted(set(of[of != NONE].tolist()), key=lambda step: starts[step])
            for place, step in enumerate(there):
                period = int(starts[there[place + 1]] - starts[step]) if place + 1 < len(there) else None
                found.append(
                    Step(
                        steps.names[step], self._device_name(device), steps.phases[step],
                        steps.evidence[step], int(starts[step]), int(ends[step] - starts[step]), int(idle[step]), period,
                        per_class[device * (count + 1) + step + 1],
                    )
                )  # fmt: skip
        return found, idle_between

    def _device_name(self, number: int) -> str:
        return str(self.work.devices[number])

    def _device(self, number: int, idle_between: int) -> Device:
        mine, line, work = self.lines[number], self.times[number], self.work
        communicates = self.communicates[mine]
        return Device(
            name=self._device_name(number),
            model=self._model(work.devices[number]),
            streams=len(np.unique(work.stream[mine])),
            calls=int(work.calls[mine].sum()),
            span_ns=int(work.end[mine].max() - work.start[mine].min()),
            busy_ns=line.covered(np.ones(len(mine), dtype=bool)),
            sum_ns=int(self.length[mine].sum()),
            idle_between_ns=idle_between,
            communication_ns=line.covered(communicates),
            exposed_communication_ns=round(self.exposed[mine][communicates].sum()),
        )

    def _model(self, device: Any) -> str:
        """Its name; a device that the head does not list, among others of one name, has that name."""
        names = self.recorded.device_names
        return names.get(device, next(iter(names.values())) if len(set(names.values())) == 1 else "")

    def _missing(self) -> list[Any]:
        from harness.serving.schema import Finding

        if self.work.on == "cpu" or self.recorded.source == "rocprof" or not len(self.recorded.launches):
            return []
        lost = int((self.work.process == NONE).sum())
        if not lost:
            return []
        message = f"{lost} of {len(self.rule)} kernels and copies have no launch in the trace: in no step"
        return [Finding(rule="no launch", severity="note", message=message)]
