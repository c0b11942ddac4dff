"""The inputs of an account, read: traces, and what the model of serving predicts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.errors import UsageError
from harness.explain.alone import Alone
from harness.explain.causes import Steps
from harness.explain.served import Log, fit, served_sizes, unlike
from harness.explain.sides import Sides
from harness.explain.step import DecodeStep, changed_op, decode_step, swapped_kernel
from harness.serving.ab.expected import link_predictions
from harness.serving.ab.record import Record
from harness.serving.clients.load import load
from harness.serving.ledger import KernelChange, Prediction
from harness.serving.link.model import System, link, point_of
from harness.serving.link.predictions import predict
from harness.serving.names import hardware_name
from harness.serving.trace.decompose import decomposed
from harness.serving.trace.profilers import read
from harness.serving.trace.result import Trace
from harness.traffic.steps import Traffic
from harness.traffic.trace import read_trace
from kernels import OPS


def steps_in(
    traces: Sequence[str], changes: Sequence[KernelChange], alone: Alone | None, sides: Sides, log: Log
) -> Steps | None:
    """The steps of one trace, with the change, or two, without it first; None of none. Raises UsageError."""
    if not traces:
        return None
    inputs = [_read(Path(path)) for path in traces]
    served = [traffic for _, traffic in inputs]
    steps = [decode_step(trace) for trace, _ in inputs]
    if len({step.until_next for step in steps}) > 1:  # only one step could last until the next one starts
        steps = [decode_step(trace, until_next=False) for trace, _ in inputs]
    if len({step.file for step in steps}) < len(steps):  # paths tell files of one name apart
        steps = [replace(step, file=path) for step, path in zip(steps, traces, strict=True)]
    before, after = (steps[0] if len(steps) == 2 else None), steps[-1]
    if changes:
        ops = tuple(change.op for change in changes)
    else:
        ops = (alone.op,) if alone else _differing_op(before, after)
    if before and alone and (kernel := swapped_kernel(before, after, ops, alone)):
        where = f"runs in {before.file}, and not in {after.file}"
        raise UsageError(f"{kernel} of {alone.after} {where}: are the traces swapped?")
    changed = changed_op(before, after, ops, alone)
    classes = {kernel.op_class for step in (before, after) if step for kernel in step.kernels.values()}
    for op in ops:  # its kernels may be of no known class: swapped ones are taken for them
        if op not in classes and not (changed.swap.old or changed.swap.new):
            raise UsageError(f"no kernel of {op} in {' or '.join(dict.fromkeys(traces))}")
    return Steps(
        before, after, ops, alone,
        fit=fit(alone, served_sizes(alone.op, served[-1]), after.file) if alone else None,
        unlike=unlike(*served) if before else "", log=log, sides=sides, changed=changed,
        changes=tuple(changes),
    )  # fmt: skip


def _read(path: Path) -> tuple[Trace, Traffic]:
    """A trace taken apart, and the steps that it tells of; no steps where it has neither annotations nor
    shapes, or has speculation and does not say its drafts. Raises UsageError where it cannot be read."""
    recorded = read(path)
    traffic = Traffic()
    with contextlib.suppress(UsageError):
        read_trace(recorded, traffic)
    return decomposed(path, recorded), traffic


def _differing_op(before: DecodeStep | None, after: DecodeStep) -> tuple[str, ...]:
    """The op of the suite whose kernels differ most between the two steps; empty where none does."""
    if before is None:
        return ()
    ms: dict[str, float] = {}
    for step, other in ((before, after), (after, before)):
        for name, kernel in step.kernels.items():
            if kernel.op_class in OPS and name not in other.kernels:
                ms[kernel.op_class] = ms.get(kernel.op_class, 0.0) + kernel.ms
    return (max(ms, key=lambda op: ms[op]),) if ms else ()


def modelled(
    record: str | None, before: Sequence[str], changes: Sequence[KernelChange], alone: Alone | None
) -> tuple[Prediction, ...]:
    """What the model of serving predicts of the change; empty if inputs do not say the machine and load.
    record: a folder of `serving ab`; before: files of results of the server without the change"""
    asked = list(changes) or ([alone.change] if alone else [])
    with contextlib.suppress(UsageError):
        if record and alone:
            return link_predictions(Record(Path(record)).plan, [alone.change])
        run = load(before[0])[0] if before and asked else None
        if run and run.hardware:
            model = link(System(hardware=hardware_name(run.hardware), calibrate=tuple(before)))
            return predict(model, point_of(run).load, asked)
    return ()
