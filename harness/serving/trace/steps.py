"""Steps of an engine, and which are prefill and which decode, each with the evidence for it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from harness.serving.trace.classify import KernelRule, Phase, annotated_phase, step_rule, step_rules
from harness.serving.trace.columns import NONE, RecordedTrace
from harness.serving.trace.work import LaunchedWork
from kernels import OPS

MODEL = ("scaled_gemm", "bf16_gemm", "mha_decode", "attention", "decode_attention", "absorbed_bmm", "norm")
"""With the suite's ops, what a step after the sampling of the one before begins with."""
STAGE = re.compile(r"-(EXTEND|DECODE)\.trace\.json")  # SGLang's --profile-by-stage names its files so


@dataclass(frozen=True)
class TraceSteps:
    """of: int [n], the step of each row, NONE outside of all; then one of each a step."""

    of: np.ndarray
    names: list[str]
    phases: list[Phase]
    evidence: list[str]


def find_steps(
    recorded: RecordedTrace,
    work: LaunchedWork,
    rules: Sequence[KernelRule],
    rule: np.ndarray,
    file_name: str,
) -> TraceSteps:
    """By an engine's annotations, else torch's ProfilerStep, else the sampling that ends each step, else the
    whole trace as one. A step's phase is what its annotation says, else what its attention is. rule: int [n],
    of each row of work its number in rules."""
    of, names, boundary = _by_annotation(recorded, work)
    if not names:
        of, names, boundary = _by_sampling(work, rules, rule)
    phases: list[Phase] = []
    evidence = []
    order = np.argsort(of, kind="stable")
    bounds = np.searchsorted(of[order], np.arange(len(names) + 1))
    either = np.array([each.sign == "either" for each in rules], dtype=bool)[rule]
    for number, name in enumerate(names):
        phase, why = annotated_phase(name), ""
        kernels = order[bounds[number] : bounds[number + 1]]
        if phase is None:
            signs = {rules[each].sign for each in np.unique(rule[kernels]).tolist()}
            phase, why = _by_attention(signs, bool((work.graph & either)[kernels].any()), file_name)
        phases.append(phase)
        evidence.append("; ".join(filter(None, (boundary, why))))
    return TraceSteps(of, names, phases, evidence)


def _by_annotation(recorded: RecordedTrace, work: LaunchedWork) -> tuple[np.ndarray, list[str], str]:
    """A step lasts from its annotation's start to the next one's: engines sample after the annotated call."""
    spans, all_names, threads = recorded.spans, recorded.names.all(), recorded.threads.all()
    marked = sorted(
        (rule, threads[thread][0], start, -length, all_names[name])
        for name, thread, start, length in zip(
            *(c.tolist() for c in (spans.name, spans.thread, spans.start, spans.length)), strict=True
        )
        if (rule := step_rule(all_names[name])) is not None
    ) if len(spans) else []  # fmt: skip
    of = np.full(len(work.start), NONE)
    if not marked:
        return of, [], ""
    processes = recorded.processes()
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
        in_process = work.process == processes.index(process)
        index = np.searchsorted(np.array(starts), work.at[in_process], side="right") - 1
        of[in_process] = np.where(index >= 0, index + first, NONE)
    return of, names, step_rules()[engines[0][0]].says


def _by_sampling(
    work: LaunchedWork, rules: Sequence[KernelRule], rule: np.ndarray
) -> tuple[np.ndarray, list[str], str]:
    sampling = np.array([each.sampling for each in rules], dtype=bool)[rule]
    model = np.array([each.op_class in OPS or each.op_class in MODEL for each in rules], dtype=bool)[rule]
    of = np.full(len(rule), NONE)
    names: list[str] = []
    boundary = "the whole trace"
    for device in np.unique(work.device):
        on_device = np.flatnonzero(work.device == device)
        on_device = on_device[np.argsort(work.start[on_device], kind="stable")]
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


def _by_attention(signs: Collection[str], in_graph: bool, file_name: str) -> tuple[Phase, str]:
    """signs: of a step's kernels; in_graph: attention for both phases is in a graph."""
    if "training" in signs:
        return "training", "kernels of a backward pass"
    if {"prefill", "decode"} <= set(signs):
        return "mixed", "attention kernels of both"
    for phase in ("prefill", "decode"):
        if phase in signs:
            return phase, "its attention kernels"
    if stage := STAGE.search(file_name):
        return ("prefill" if stage[1] == "EXTEND" else "decode"), "the file's name"
    if in_graph:
        return "decode", "its attention is in a graph, as engines do for decode"
    return "other", "no attention kernel tells" if "either" in signs else "no attention kernels"
