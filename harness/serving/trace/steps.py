"""Steps of an engine, and which are prefill and which decode, each with the evidence for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.serving.trace.classify import KernelRule, Phase, annotated_phase, step_rule, step_rules
from harness.serving.trace.columns import NONE, RecordedTrace
from kernels import OPS

MODEL = ("scaled_gemm", "bf16_gemm", "mha_decode", "attention", "decode_attention", "absorbed_bmm", "norm")
"""With the suite's ops, what a step after the sampling of the one before begins with."""
STAGE = re.compile(r"-(EXTEND|DECODE)\.trace\.json")  # SGLang's --profile-by-stage names its files so


@dataclass(frozen=True)
class Rows:
    """What is to be given to steps, a row for each stretch of work.

    rule:    int [n], number in `rules`
    device:  int [n]; start: int64 [n], ns
    at:      int64 [n], ns: when its launch was called
    process: int [n]: who launched it; NONE: not known
    graph:   bool [n]: launched by a graph
    """

    rules: Sequence[KernelRule]
    rule: np.ndarray
    device: np.ndarray
    start: np.ndarray
    at: np.ndarray
    process: np.ndarray
    graph: np.ndarray


@dataclass(frozen=True)
class TraceSteps:
    """of: int [n], the step of each row, NONE outside of all; then one of each a step."""

    of: np.ndarray
    names: list[str]
    phases: list[Phase]
    evidence: list[str]


def find_steps(recorded: RecordedTrace, rows: Rows, file_name: str) -> TraceSteps:
    """By an engine's annotations, else torch's ProfilerStep, else the sampling that ends each step, else the
    whole trace as one. A step's phase is what its annotation says, else what its attention is."""
    of, names, boundary = _by_annotation(recorded, rows)
    if not names:
        of, names, boundary = _by_sampling(rows)
    phases: list[Phase] = []
    evidence = []
    order = np.argsort(of, kind="stable")
    bounds = np.searchsorted(of[order], np.arange(len(names) + 1))
    for number, name in enumerate(names):
        annotated = annotated_phase(name)
        kernels = order[bounds[number] : bounds[number + 1]]
        phase, why = (annotated, "") if annotated else _by_attention(rows, kernels, file_name)
        phases.append(phase)
        evidence.append("; ".join(filter(None, (boundary, why))))
    return TraceSteps(of, names, phases, evidence)


def _by_annotation(recorded: RecordedTrace, rows: Rows) -> tuple[np.ndarray, list[str], str]:
    """A step lasts from its annotation's start to the next one's: engines sample after the annotated call."""
    spans, all_names, threads = recorded.spans, recorded.names.all(), recorded.threads.all()
    marked = sorted(
        (rule, threads[thread][0], start, -length, all_names[name])
        for name, thread, start, length in zip(
            *(c.tolist() for c in (spans.name, spans.thread, spans.start, spans.length)), strict=True
        )
        if (rule := step_rule(all_names[name])) is not None
    ) if len(spans) else []  # fmt: skip
    of = np.full(len(rows.rule), NONE)
    if not marked:
        return of, [], ""
    processes = processes_of(recorded)
    torch_only = len(step_rules()) - 1
    engines = [mark for mark in marked if mark[0] != torch_only] or marked
    names: list[str] = []
    for process in dict.fromkeys(mark[1] for mark in engines):
        starts, until = [], None
        first = len(names)
        for _, _, start, negative, name in sorted(
            (mark for mark in engines if mark[1] == process), key=lambda mark: mark[2:4]
        ):
            if until is None or start >= until:  # one inside another is the same step
                until = start - negative
                starts.append(start)
                names.append(name)
        in_process = rows.process == processes.index(process)
        index = np.searchsorted(np.array(starts), rows.at[in_process], side="right") - 1
        of[in_process] = np.where(index >= 0, index + first, NONE)
    return of, names, step_rules()[engines[0][0]].says


def processes_of(recorded: RecordedTrace) -> list[object]:
    """The processes that threads are of; `process` in Rows is a number in it."""
    return list(dict.fromkeys(process for process, _ in recorded.threads.all()))


def _by_sampling(rows: Rows) -> tuple[np.ndarray, list[str], str]:
    sampling = np.array([rule.sampling for rule in rows.rules], dtype=bool)[rows.rule]
    model = np.array([rule.op_class in OPS or rule.op_class in MODEL for rule in rows.rules], dtype=bool)[
        rows.rule
    ]
    of = np.full(len(rows.rule), NONE)
    names: list[str] = []
    boundary = "the whole trace"
    for device in np.unique(rows.device):
        on_device = np.flatnonzero(rows.device == device)
        on_device = on_device[np.argsort(rows.start[on_device], kind="stable")]
        sampled = np.maximum.accumulate(np.where(sampling[on_device], np.arange(len(on_device)), NONE))
        begun = np.maximum.accumulate(np.where(model[on_device], np.arange(len(on_device)), NONE))
        last_model = np.concatenate([[NONE], begun[:-1]])
        starts = model[on_device] & (sampled > last_model) & (sampled >= 0) & (last_model >= 0)
        of[on_device] = len(names) + np.cumsum(starts)
        count = int(starts.sum()) + 1
        if count > 1:
            boundary = "between the sampling of one and the products of the next"
        names += [f"step {i}" for i in range(count)]
    return of, names, boundary


def _by_attention(rows: Rows, kernels: np.ndarray, file_name: str) -> tuple[Phase, str]:
    signs = np.array([rule.sign for rule in rows.rules])[rows.rule[kernels]]
    present = set(signs.tolist())
    if "training" in present:
        return "training", "kernels of a backward pass"
    if {"prefill", "decode"} <= present:
        return "mixed", "attention kernels of both"
    if "prefill" in present:
        return "prefill", "its attention kernels"
    if "decode" in present:
        return "decode", "its attention kernels"
    if stage := STAGE.search(file_name):
        return ("prefill" if stage[1] == "EXTEND" else "decode"), "the file's name"
    if (rows.graph[kernels] & (signs == "either")).any():
        return "decode", "its attention is in a graph, as engines do for decode"
    return "other", "no attention kernel tells" if "either" in present else "no attention kernels"
