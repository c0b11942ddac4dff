"""Takes a trace apart into classes, kernels and steps, with the part of each that is exposed."""

from __future__ import annotations

import math
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
from harness.serving.trace.work import LaunchedWork, kernel_work, operator_work
from kernels import OPS

CLASSES = tuple(OP_CLASSES)
LATENT = re.compile(r"(?<![A-Za-z])mla(?![a-z])|MLA|(?<=[a-z])Mla(?![a-z])")
"""Names of kernels or operators which show that the model's attention is over a latent cache."""
SHAPES = 5  # shapes of a kernel that are kept: those with the most time


def decompose(path: str | Path, *, partial: bool = False) -> Trace:
    """Takes a trace of torch.profiler, rocprofv3 or nsys stats apart, plain or gzip. Raises UnreadableError.

    Times are those of kernels and copies. In a trace without any they are those of the operators of CPU
    threads; the time of an operator is then without that of the operators inside it.
    partial: takes what there is of a file that breaks off, and flags it
    """
    return decomposed(Path(path), read(Path(path), partial=partial))


def decomposed(path: Path, recorded: RecordedTrace) -> Trace:
    """As `decompose`, of a trace that was read from this path."""
    work = kernel_work(recorded) if len(recorded.work) else operator_work(recorded)
    return _Sums(path, recorded, work).trace()


def _rules(recorded: RecordedTrace, work: LaunchedWork) -> tuple[list[KernelRule], np.ndarray]:
    """The rules that fit, and for each row of work the number of its rule in them, int [n]."""
    names = list(recorded.names)
    pairs, pair_of_row = groups(work.name, work.op)
    numbers: dict[KernelRule, int] = {}
    number_of_pair = []
    for name, op in pairs:
        launcher = names[name] if op == NONE else names[op]  # An operator is its own launcher.
        rule = rule_of(names[name], launcher)
        number_of_pair.append(numbers.setdefault(rule, len(numbers)))
    return list(numbers), np.array(number_of_pair)[pair_of_row]


class _Sums:
    """Sums over the rows of work, by class, kernel, step and device.

    rule, step, phase, op_class: for each row its number in rules, steps, PHASES and CLASSES; step may be NONE
    length, exposed:             of each row, in ns
    on_device, unions:           for each device its rows in the order of time; and the ns of the union of all
                                 its work, and of its communication
    """

    def __init__(self, path: Path, recorded: RecordedTrace, work: LaunchedWork) -> None:
        self.path, self.recorded, self.work = path, recorded, work
        self.rules, self.rule = _rules(recorded, work)
        self.step, self.steps = find_steps(work, recorded, self.rules, self.rule, path.name)
        latent = any(LATENT.search(name) for name in recorded.names)
        class_of = np.array([  # by rule and phase
            [CLASSES.index(classify.attention_class(rule.op_class, phase, latent)) for phase in PHASES]
            for rule in self.rules
        ])  # fmt: skip
        step_phases: list[Phase] = [step["phase"] for step in self.steps]
        phase_of_step = np.array([PHASES.index(phase) for phase in (*step_phases, "other")])
        self.phase = phase_of_step[self.step]  # NONE, which is -1, takes the last
        self.op_class = class_of[self.rule, self.phase]
        self.length = work.end - work.start
        self.communicates = np.isin(self.op_class, [CLASSES.index(name) for name in COMMUNICATION])
        self.exposed = np.zeros(len(self.rule))
        order = np.argsort(work.start, kind="stable")
        self.on_device = [order[work.device[order] == i] for i in range(len(work.devices))]
        self.unions = []
        for rows in self.on_device:
            intervals = (work.start[rows], work.end[rows], self.communicates[rows])
            self.exposed[rows], *unions = critical_path(*intervals)
            self.unions.append(unions)

    def trace(self) -> Trace:
        recorded, names = self.recorded, list(self.recorded.names)
        operators = [names[number] for number in np.unique(recorded.ops.name).tolist()]
        annotations = [names[number] for number in np.unique(recorded.spans.name).tolist()]
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
        keys, group = groups(*columns)
        calls = np.bincount(group, self.work.calls, len(keys)).astype(int)
        exposed = np.bincount(group, self.exposed, len(keys))
        time = np.zeros(len(keys), dtype=np.int64)
        np.add.at(time, group, self.length)
        return [
            (keys[i], Times(int(calls[i]), int(time[i]), float(exposed[i])))
            for i in np.argsort(-time, kind="stable").tolist()
        ]

    def _kernels(self) -> Iterator[KernelTime]:
        names, shape_texts = list(self.recorded.names), list(self.recorded.shapes)
        kernel_columns = (self.op_class, self.phase, self.work.name, self.rule)
        shapes: dict[tuple[int, ...], dict[str, Times]] = {}
        for (*kernel, shape), times in self._sum(*kernel_columns, self.work.shapes):
            of_kernel = shapes.setdefault(tuple(kernel), {})
            if shape != NONE and len(of_kernel) < SHAPES:
                of_kernel[shape_texts[shape]] = times
        ops: dict[tuple[int, ...], str] = {}
        for (*kernel, op), _ in self._sum(*kernel_columns, self.work.op):
            if op != NONE:
                ops.setdefault(tuple(kernel), names[op])  # the first one has the most time
        for columns, times in self._sum(*kernel_columns):
            op_class, phase, name, rule = columns
            yield KernelTime(
                **vars(times), name=names[name], op_class=CLASSES[op_class], phase=PHASES[phase],
                library=self.rules[rule].library, op=ops.get(columns, ""), shapes=shapes[columns],
            )  # fmt: skip

    def _steps(self) -> tuple[list[TraceStep], list[int]]:
        """The steps of each device in the order of time, and the idle time of each device outside of them."""
        work, count = self.work, len(self.steps)
        trace_steps: list[TraceStep] = []
        idle_between = []
        by_step: dict[tuple[int, int], dict[str, Times]] = {}  # by device and step: times by class
        for (device, step, op_class), times in self._sum(work.device, self.step, self.op_class):
            by_step.setdefault((device, step), {})[CLASSES[op_class]] = times
        trace_start = int(work.start.min())
        for device, rows in enumerate(self.on_device):
            step_of = self.step[rows]
            starts = np.full(count + 1, np.iinfo(np.int64).max)  # by step; NONE is the last
            ends = np.full(count + 1, np.iinfo(np.int64).min)
            np.minimum.at(starts, step_of, work.start[rows])
            np.maximum.at(ends, step_of, work.end[rows])
            idle_within, between = self._idle(rows, starts)
            idle_between.append(between)
            steps = sorted(set(step_of[step_of != NONE].tolist()), key=lambda step: starts[step])
            for step, following in zip(steps, [*steps[1:], None], strict=True):
                classes = by_step[device, step]
                trace_steps.append(TraceStep(
                    **self.steps[step], device=str(work.devices[device]),
                    start_ns=int(starts[step]) - trace_start, span_ns=int(ends[step] - starts[step]),
                    idle_ns=int(idle_within[step]),
                    period_ns=None if following is None else int(starts[following] - starts[step]),
                    time_ns=sum(times.time_ns for times in classes.values()), classes=classes,
                ))  # fmt: skip
        return trace_steps, idle_between

    def _idle(self, rows: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, int]:
        """The idle time of a device within each step and outside of all steps, in ns.
        rows: those of the device, in the order of time; starts: of each step"""
        start, end, step_of = self.work.start[rows], self.work.end[rows], self.step[rows]
        idle_before = start[1:] - np.maximum.accumulate(end)[:-1]  # of each row but the first
        after_idle = np.flatnonzero(idle_before > 0) + 1  # rows that begin after the device was idle
        idle_ns, step_after = idle_before[after_idle - 1], step_of[after_idle]
        # Idle time is within a step if the row after it is of that step and not its first.
        within = (step_after != NONE) & (starts[step_after] < start[after_idle])
        by_step = np.bincount(step_after[within], idle_ns[within], len(self.steps))
        return by_step, int(idle_ns[~within].sum())

    def _device(self, number: int, idle_between: int) -> Device:
        rows, work, models = self.on_device[number], self.work, self.recorded.device_names
        device, (busy_ns, communication_ns) = work.devices[number], self.unions[number]
        # A device that the head does not list has the model of the others, if they have one model.
        known = set(models.values())
        model = known.pop() if len(known) == 1 else ""
        span_ns, sum_ns = int(work.end[rows].max() - work.start[rows].min()), int(self.length[rows].sum())
        return Device(
            name=str(device), model=models.get(device, model), streams=len(np.unique(work.stream[rows])),
            calls=int(work.calls[rows].sum()), span_ns=span_ns, busy_ns=busy_ns, idle_ns=span_ns - busy_ns,
            idle_between_steps_ns=idle_between, sum_ns=sum_ns, overlapped_ns=sum_ns - busy_ns,
            communication_ns=communication_ns,
            exposed_communication_ns=round(self.exposed[rows][self.communicates[rows]].sum()),
        )  # fmt: skip

    def _note_steps(self, steps: Sequence[TraceStep]) -> None:
        """Notes kernels in no step, and steps with far fewer calls than others of their phase."""
        without_launch, note = int((self.work.process == NONE).sum()), self.recorded.note
        if without_launch and self.work.on == "gpu" and len(self.recorded.launches):
            what = f"{without_launch} of {len(self.rule)} kernels and copies have no launch in the trace"
            note("no launch", f"{what}: in no step", "note")
        for phase in PHASES:
            of_phase = [step for step in steps if step.phase == phase]
            calls = [sum(times.calls for times in step.classes.values()) for step in of_phase]
            few = [count for count in calls if 2 * count < statistics.median(calls)]
            if few:
                what = f"{len(few)} of {len(calls)} {phase} steps have less than half of their median's calls"
                why = "the profiler began or ended within them, or they are of another kind"
                note("cut step", f"{what}: {why}", "note")


# Steps of an engine, and their phases

MODEL_CLASSES = {*OPS, "scaled_gemm", "bf16_gemm", "mha_decode", "attention", "decode_attention",
                 "absorbed_bmm", "norm"}  # fmt: skip
"""Classes of the kernels with which a step begins after the sampling of the step before."""
STAGE = re.compile(r"-(EXTEND|DECODE)\.trace\.json")  # names of files of SGLang's --profile-by-stage


def find_steps(
    work: LaunchedWork, recorded: RecordedTrace, rules: Sequence[KernelRule], row_rule: np.ndarray, file: str
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The step of each row, int [n], NONE outside of all steps; and name, phase and evidence of each step.

    The steps are an engine's annotations; or else torch's ProfilerStep; or else they end with sampling; or
    else all is one step. The phase of a step is what its annotation says, or else what its attention shows.
    row_rule: int [n], for each row of work the number of its rule in `rules`; file: the trace's name"""
    step_of, names = _by_annotation(work, recorded)
    boundary = "the whole trace"  # the evidence of steps without annotations
    if not names:
        step_of, names = _by_sampling(work, rules, row_rule)
        if len(names) > len(np.unique(work.device)):  # else no device has more than one step
            boundary = "between the sampling of one and the products of the next"
    order = np.argsort(step_of, kind="stable")
    bounds = np.searchsorted(step_of[order], np.arange(len(names) + 1))
    in_graph = np.array([rule.step_phase == "either" for rule in rules])[row_rule] & work.graph
    steps = []
    for number, name in enumerate(names):
        annotation, phase = classify.step_rule(name), classify.annotated_phase(name)
        evidence = annotation.evidence if annotation else boundary
        if phase is None:
            rows = order[bounds[number] : bounds[number + 1]]
            signs = {rules[i].step_phase for i in np.unique(row_rule[rows]).tolist()}
            phase, why = _by_attention(signs, bool(in_graph[rows].any()), file)
            evidence += f"; {why}"
        steps.append({"name": name, "phase": phase, "evidence": evidence})
    return step_of, steps


def _by_annotation(work: LaunchedWork, recorded: RecordedTrace) -> tuple[np.ndarray, list[str]]:
    """The step of each row and the steps' names, by annotations. A step lasts until the next one of its
    process starts, because engines sample after the annotated call."""
    spans, names = recorded.spans, list(recorded.names)
    processes, process_of_thread = recorded.threads.owners()
    columns = (spans.start, spans.start + spans.length, spans.name, process_of_thread[spans.thread])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    marks = [(start, end, names[name], process) for start, end, name, process in rows]
    of_engine = [mark for mark in marks if (rule := classify.step_rule(mark[2])) and rule.engine]
    marks = sorted(of_engine or marks, key=lambda mark: (mark[0], -mark[1], *mark[2:]))  # outer ones first
    step_of = np.full(len(work.start), NONE)
    step_names: list[str] = []
    for process in range(len(processes)):
        starts: list[int] = []
        first_step, until = len(step_names), -math.inf
        for start, end, name, marked_process in marks:
            # An annotation inside another one is the same step.
            if marked_process == process and start >= until:
                until = end
                starts.append(start)
                step_names.append(name)
        of_process = work.process == process
        step = np.searchsorted(np.array(starts), work.at[of_process], side="right") - 1
        step_of[of_process] = np.where(step >= 0, step + first_step, NONE)
    return step_of, step_names


def _by_sampling(
    work: LaunchedWork, rules: Sequence[KernelRule], row_rule: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """The step of each row and the steps' names. A step begins with the first model kernel after sampling."""
    is_sampling = np.array([rule.is_sampling for rule in rules])[row_rule]
    is_model = np.array([rule.op_class in MODEL_CLASSES for rule in rules])[row_rule]
    step_of = np.full(len(row_rule), NONE)
    names: list[str] = []
    for device in np.unique(work.device):
        rows = np.flatnonzero(work.device == device)
        rows = rows[np.argsort(work.start[rows], kind="stable")]
        places = np.arange(len(rows))
        last_sampling = np.maximum.accumulate(np.where(is_sampling[rows], places, NONE))
        last_model = np.maximum.accumulate(np.where(is_model[rows], places, NONE))
        model_before = np.concatenate([[NONE], last_model[:-1]])  # the model kernel before each row
        # A step begins with a model kernel if sampling came after the model kernel before it.
        begins = is_model[rows] & (model_before != NONE) & (last_sampling > model_before)
        step_of[rows] = len(names) + np.cumsum(begins)
        names += [f"step {i}" for i in range(int(begins.sum()) + 1)]
    return step_of, names


def _by_attention(signs: Collection[str], in_graph: bool, file_name: str) -> tuple[Phase, str]:
    """Phase and evidence by the attention of a step.
    signs: KernelRule.step_phase of its kernels; in_graph: whether a graph has attention that serves both"""
    if "training" in signs:
        return "training", "kernels of a backward pass"
    if "prefill" in signs and "decode" in signs:
        return "mixed", "attention kernels of both"
    if "prefill" in signs:
        return "prefill", "its attention kernels"
    if "decode" in signs:
        return "decode", "its attention kernels"
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
    lengths = np.diff(moments)  # from each moment to the next
    first, last = np.searchsorted(moments, start), np.searchsorted(moments, end)

    def count_running(which: np.ndarray) -> np.ndarray:
        """How many of these intervals run from each moment to the next."""
        begun, ended = (np.bincount(at[which], minlength=len(moments)) for at in (first, last))
        return np.cumsum(begun - ended)[:-1]

    def sum_of_parts(count: np.ndarray) -> np.ndarray:
        """For each interval the sum of its equal parts of the lengths in which `count` intervals share."""
        part = np.where(count > 0, lengths / np.maximum(count, 1), 0.0)
        up_to_moment = np.concatenate([[0.0], np.cumsum(part)])
        return up_to_moment[last] - up_to_moment[first]

    computing, communicating = count_running(~communicates), count_running(communicates)
    only_communicating = np.where(computing == 0, communicating, 0)
    exposed = np.where(communicates, sum_of_parts(only_communicating), sum_of_parts(computing))
    busy = lengths[computing + communicating > 0].sum()
    return exposed, int(busy), int(lengths[communicating > 0].sum())
