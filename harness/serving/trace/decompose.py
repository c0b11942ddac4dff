"""Takes a trace apart into classes, kernels and steps, with the part of each that is exposed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.serving.names import COMMUNICATION, OP_CLASSES
from harness.serving.trace import classify
from harness.serving.trace.classify import PHASES, KernelRule, Phase, rule_of
from harness.serving.trace.profilers import NONE, RecordedTrace, groups, read
from harness.serving.trace.result import Device, KernelTime, Times, Trace, TraceStep
from harness.serving.trace.work import LaunchedWork, kernels, operators
from kernels import OPS

CLASSES = tuple(OP_CLASSES)
LATENT = re.compile(r"(?<![A-Za-z])mla(?![a-z])|MLA|(?<=[a-z])Mla(?![a-z])")
"""Names of kernels or operators which show that the model's attention is over a latent cache."""
SHAPES = 5  # shapes of a kernel that are kept: those with the most time


def decompose(path: str | Path, *, partial: bool = False) -> Trace:
    """Takes a trace of torch.profiler, rocprofv3 or nsys stats apart, plain or gzip. Raises UnreadableError.

    Kernels and copies count, or without any operators of CPU threads, each without those inside it.
    partial: takes what there is of a file that breaks off, and flags it
    """
    return decomposed(Path(path), read(Path(path), partial=partial))


def decomposed(path: Path, recorded: RecordedTrace) -> Trace:
    """As `decompose`, of a trace that was read from this path."""
    work = kernels(recorded) if len(recorded.work) else operators(recorded)
    return _Sums(path, recorded, work).trace()


def _rules(recorded: RecordedTrace, work: LaunchedWork) -> tuple[list[KernelRule], np.ndarray]:
    """The rules that fit, and each row's number in them. An operator is its own launcher."""
    names = list(recorded.names)
    pairs, pair_of = groups(work.name, work.op)
    rules: dict[KernelRule, int] = {}
    numbers = []
    for name, op in pairs:
        rule = rule_of(names[name], names[name if op == NONE else op])
        numbers.append(rules.setdefault(rule, len(rules)))
    return list(rules), np.array(numbers)[pair_of]


class _Sums:
    """Sums over the rows of work, by class, kernel, step and device."""

    def __init__(self, path: Path, recorded: RecordedTrace, work: LaunchedWork) -> None:
        self.path, self.recorded, self.work = path, recorded, work
        self.rules, self.rule = _rules(recorded, work)
        self.step, self.steps = find_steps(work, recorded, self.rules, self.rule, path.name)
        latent = any(LATENT.search(name) for name in recorded.names)
        classes = [
            [CLASSES.index(classify.attention_class(rule.op_class, phase, latent)) for phase in PHASES]
            for rule in self.rules
        ]
        of_step = np.array([*(PHASES.index(step["phase"]) for step in self.steps), PHASES.index("other")])
        self.phase = of_step[self.step]  # NONE is the last
        self.op_class = np.array(classes)[self.rule, self.phase]
        self.length = work.end - work.start
        self.communicates = np.isin(self.op_class, [CLASSES.index(name) for name in COMMUNICATION])
        self.exposed = np.zeros(len(self.rule))
        order = np.argsort(work.start, kind="stable")
        self.on_device = [order[work.device[order] == i] for i in range(len(work.devices))]
        self.unions = []  # of all work, and of communication, on each device
        for rows in self.on_device:
            self.exposed[rows], *unions = critical_path(
                work.start[rows], work.end[rows], self.communicates[rows]
            )
            self.unions.append(unions)

    def trace(self) -> Trace:
        recorded, names = self.recorded, list(self.recorded.names)
        numbers = (np.unique(column).tolist() for column in (recorded.ops.name, recorded.spans.name))
        operators, annotations = ([names[number] for number in each] for each in numbers)
        steps, idle_between = self._steps()
        self._note_steps(steps)
        return Trace(
            path=str(self.path), source=recorded.source, on=self.work.on,
            engine=classify.engine_of(operators, annotations),
            rank=recorded.rank, world_size=recorded.world_size, partial=recorded.truncated,
            devices=tuple(self._device(i, idle) for i, idle in enumerate(idle_between)),
            kernels=tuple(self._kernels()), steps=tuple(steps), categories=dict(recorded.categories),
            findings=tuple(recorded.findings),
        )  # fmt: skip

    def _sum(self, *columns: np.ndarray) -> list[tuple[tuple[int, ...], Times]]:
        """Numbers and times of the rows that have equal numbers in these columns, the most time first."""
        keys, of = groups(*columns)
        calls = np.bincount(of, self.work.calls, len(keys)).astype(int)
        exposed = np.bincount(of, self.exposed, len(keys))
        time = np.zeros(len(keys), dtype=np.int64)
        np.add.at(time, of, self.length)
        return [
            (keys[i], Times(int(calls[i]), int(time[i]), float(exposed[i])))
            for i in np.argsort(-time, kind="stable").tolist()
        ]

    def _kernels(self) -> Iterator[KernelTime]:
        names, texts, work = list(self.recorded.names), list(self.recorded.shapes), self.work
        which = (self.op_class, self.phase, work.name, self.rule)
        shapes: dict[tuple[int, ...], dict[str, Times]] = {}
        for (*kernel, shape), times in self._sum(*which, work.shapes):
            of_kernel = shapes.setdefault(tuple(kernel), {})
            if shape != NONE and len(of_kernel) < SHAPES:
                of_kernel[texts[shape]] = times
        ops: dict[tuple[int, ...], str] = {}
        for (*kernel, op), _ in self._sum(*which, work.op):
            if op != NONE:
                ops.setdefault(tuple(kernel), names[op])
        for columns, times in self._sum(*which):
            op_class, phase, name, rule = columns
            yield KernelTime(
                **vars(times), name=names[name], op_class=CLASSES[op_class], phase=PHASES[phase],
                library=self.rules[rule].library, op=ops.get(columns, ""), shapes=shapes[columns],
            )  # fmt: skip

    def _steps(self) -> tuple[list[TraceStep], list[int]]:
        """The steps of each device in the order of time, and the idle time of each device outside of them."""
        work, count = self.work, len(self.steps)
        found: list[TraceStep] = []
        idle_between = []
        per_class: dict[tuple[int, int], dict[str, Times]] = {}
        for (device, step, op_class), times in self._sum(work.device, self.step, self.op_class):
            per_class.setdefault((device, step), {})[CLASSES[op_class]] = times
        origin = int(work.start.min())
        for device, rows in enumerate(self.on_device):
            of, start, end = self.step[rows], work.start[rows], work.end[rows]
            starts = np.full(count + 1, np.iinfo(np.int64).max)  # NONE is the last
            ends = np.full(count + 1, np.iinfo(np.int64).min)
            np.minimum.at(starts, of, start)
            np.maximum.at(ends, of, end)
            idle = start[1:] - np.maximum.accumulate(end)[:-1]
            after = np.flatnonzero(idle > 0) + 1  # steps that begin after the device was idle
            length = idle[after - 1]
            inside = (of[after] != NONE) & (starts[of[after]] < start[after])
            idle_between.append(int(length[~inside].sum()))
            within = np.bincount(of[after][inside], length[inside], count)
            there = sorted(set(of[of != NONE].tolist()), key=lambda step: starts[step])
            for step, following in zip(there, [*there[1:], None], strict=True):
                classes = per_class[device, step]
                found.append(TraceStep(
                    **self.steps[step], device=str(work.devices[device]),
                    start_ns=int(starts[step]) - origin, span_ns=int(ends[step] - starts[step]),
                    idle_ns=int(within[step]),
                    period_ns=None if following is None else int(starts[following] - starts[step]),
                    time_ns=sum(times.time_ns for times in classes.values()), classes=classes,
                ))  # fmt: skip
        return found, idle_between

    def _device(self, number: int, idle_between: int) -> Device:
        rows, work, models = self.on_device[number], self.work, self.recorded.device_names
        device, (busy, communication) = work.devices[number], self.unions[number]
        # A device that the head does not list has the model of the others, if they have one model.
        model = next(iter(models.values())) if len(set(models.values())) == 1 else ""
        span, total = int(work.end[rows].max() - work.start[rows].min()), int(self.length[rows].sum())
        return Device(
            name=str(device), model=models.get(device, model), streams=len(np.unique(work.stream[rows])),
            calls=int(work.calls[rows].sum()), span_ns=span, busy_ns=busy, idle_ns=span - busy,
            idle_between_steps_ns=idle_between, sum_ns=total, overlapped_ns=total - busy,
            communication_ns=communication,
            exposed_communication_ns=round(self.exposed[rows][self.communicates[rows]].sum()),
        )  # fmt: skip

    def _note_steps(self, steps: Sequence[TraceStep]) -> None:
        """Notes kernels in no step, and steps with far fewer calls than others of their phase."""
        lost, note = int((self.work.process == NONE).sum()), self.recorded.note
        if lost and self.work.on == "gpu" and len(self.recorded.launches):
            message = f"{lost} of {len(self.rule)} kernels and copies have no launch in the trace: in no step"
            note("no launch", message, "note")
        for phase in PHASES:
            calls = [sum(t.calls for t in step.classes.values()) for step in steps if step.phase == phase]
            if few := sum(2 * count < statistics.median(calls) for count in calls):
                message = f"{few} of {len(calls)} {phase} steps have less than half of their median's calls"
                why = "the profiler began or ended within them, or they are of another kind"
                note("cut step", f"{message}: {why}", "note")


# Steps of an engine, and their phases

MODEL = {*OPS, "scaled_gemm", "bf16_gemm", "mha_decode", "attention", "decode_attention", "absorbed_bmm",
         "norm"}  # fmt: skip
"""Classes of the kernels with which a step begins after the sampling of the step before."""
STAGE = re.compile(r"-(EXTEND|DECODE)\.trace\.json")  # names of files of SGLang's --profile-by-stage


def find_steps(
    work: LaunchedWork, recorded: RecordedTrace, rules: Sequence[KernelRule], rule: np.ndarray, file: str
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The step of each row, int [n], NONE outside of all steps; and name, phase and evidence of each step.

    The steps are an engine's annotations; or else torch's ProfilerStep; or else they end with sampling; or
    else all is one step. The phase of a step is what its annotation says, or else what its attention shows.

    rule: int [n], for each row of work the number of its rule in `rules`
    file: the trace's name
    """
    of, names = _by_annotation(work, recorded)
    boundary = ""
    if not names:
        of, names = _by_sampling(work, rules, rule)
        more = len(names) > len(np.unique(work.device))
        boundary = "between the sampling of one and the products of the next" if more else "the whole trace"
    order = np.argsort(of, kind="stable")
    bounds = np.searchsorted(of[order], np.arange(len(names) + 1))
    in_graph = np.array([each.sign == "either" for each in rules])[rule] & work.graph
    steps = []
    for number, name in enumerate(names):
        annotation, phase, why = classify.step_rule(name), classify.annotated_phase(name), ""
        if phase is None:
            rows = order[bounds[number] : bounds[number + 1]]
            signs = {rules[each].sign for each in np.unique(rule[rows]).tolist()}
            phase, why = _by_attention(signs, bool(in_graph[rows].any()), file)
        says = annotation.says if annotation else boundary
        steps.append({"name": name, "phase": phase, "evidence": f"{says}; {why}" if why else says})
    return of, steps


def _by_annotation(work: LaunchedWork, recorded: RecordedTrace) -> tuple[np.ndarray, list[str]]:
    """Steps by annotations. They last until the next one starts: engines sample after the annotated call."""
    spans, all_names, threads = recorded.spans, list(recorded.names), list(recorded.threads)
    columns = (spans.start, spans.length, spans.name, spans.thread)
    marks = sorted(
        (start, -length, all_names[name], threads[thread][0])
        for start, length, name, thread in zip(*(column.tolist() for column in columns), strict=True)
    )
    of_engine = [mark for mark in marks if (rule := classify.step_rule(mark[2])) and rule.engine]
    of = np.full(len(work.start), NONE)
    names: list[str] = []
    for number, process in enumerate(recorded.threads.owners()[0]):
        starts: list[int] = []
        first, until = len(names), None
        for start, negative, name, marked in of_engine or marks:
            # An annotation inside another one is the same step.
            if marked == process and (until is None or start >= until):
                until = start - negative
                starts.append(start)
                names.append(name)
        of_process = work.process == number
        step = np.searchsorted(np.array(starts), work.at[of_process], side="right") - 1
        of[of_process] = np.where(step >= 0, step + first, NONE)
    return of, names


def _by_sampling(
    work: LaunchedWork, rules: Sequence[KernelRule], rule: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    sampling = np.array([each.sampling for each in rules])[rule]
    model = np.array([each.op_class in MODEL for each in rules])[rule]
    of = np.full(len(rule), NONE)
    names: list[str] = []
    for device in np.unique(work.device):
        rows = np.flatnonzero(work.device == device)
        rows = rows[np.argsort(work.start[rows], kind="stable")]
        sampled = np.maximum.accumulate(np.where(sampling[rows], np.arange(len(rows)), NONE))
        begun = np.maximum.accumulate(np.where(model[rows], np.arange(len(rows)), NONE))
        last_model = np.concatenate([[NONE], begun[:-1]])
        starts = model[rows] & (sampled > last_model) & (sampled >= 0) & (last_model >= 0)
        of[rows] = len(names) + np.cumsum(starts)
        names += [f"step {i}" for i in range(int(starts.sum()) + 1)]
    return of, names


def _by_attention(signs: Collection[str], in_graph: bool, file_name: str) -> tuple[Phase, str]:
    """Phase and evidence by attention. in_graph: whether a graph has attention that serves both phases"""
    if "training" in signs:
        return "training", "kernels of a backward pass"
    if "prefill" in signs and "decode" in signs:
        return "mixed", "attention kernels of both"
    for phase in ("prefill", "decode"):
        if phase in signs:
            return phase, "its attention kernels"
    if stage := STAGE.search(file_name):
        return ("prefill" if stage[1] == "EXTEND" else "decode"), "the file's name"
    if in_graph:
        return "decode", "its attention is in a graph, as engines do for decode"
    return "other", "no attention kernel tells" if "either" in signs else "no attention kernels"


# The part of a sum of durations that is exposed


def critical_path(
    start: np.ndarray, end: np.ndarray, communicates: np.ndarray
) -> tuple[np.ndarray, int, int]:
    """Each interval's part of the time on the critical path, float64 [n]; the length of the union of all
    intervals, which is the sum of those parts; and that of the union of what communicates. All are in ns.

    Time in which anything computes belongs to what computes, in equal parts if several do. The rest belongs
    to what communicates. So communication has the time that no computation covers.
    """
    moments = np.unique(np.concatenate([start, end]))
    lengths, size = np.diff(moments), len(moments)
    first, last = np.searchsorted(moments, start), np.searchsorted(moments, end)
    running = []  # how many compute, and how many communicate, from each moment to the next
    for which in (~communicates, communicates):
        begun, ended = (np.bincount(at[which], minlength=size) for at in (first, last))
        running.append(np.cumsum(begun - ended)[:-1])
    computing, communicating = running
    parts = []  # of one interval that computes, or communicates, up to each moment
    for number, counts in ((computing, computing > 0), (communicating, computing == 0)):
        each = np.where(counts & (number > 0), lengths / np.maximum(number, 1), 0.0)
        parts.append(np.concatenate([[0.0], np.cumsum(each)]))
    compute, communicate = (part[last] - part[first] for part in parts)
    busy, communication = (lengths[which > 0].sum() for which in (computing + communicating, communicating))
    return np.where(communicates, communicate, compute), int(busy), int(communication)
