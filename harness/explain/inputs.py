"""The inputs of an account, read: traces, and what the model of serving predicts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.errors import UsageError
from harness.explain.alone import Alone
from harness.explain.causes import Steps
from harness.explain.served import Log, fit, of_trace, served_sizes, unlike
from harness.explain.sides import Sides
from harness.explain.step import DecodeStep, changed, decode_step, swapped
from harness.serving.ab.record import Record
from harness.serving.ab.result import of_link
from harness.serving.clients.load import load
from harness.serving.ledger import KernelChange, Prediction
from harness.serving.link.model import System, link, point_of
from harness.serving.link.predictions import predict
from harness.serving.names import hardware_name
from harness.serving.trace import decompose
from kernels import OPS


def steps_in(
    traces: Sequence[str], changes: Sequence[KernelChange], alone: Alone | None, sides: Sides, log: Log
) -> Steps | None:
    """Of one trace, that with the change, or of both. Raises UsageError."""
    if not traces:
        return None
    taken = [decompose(path) for path in traces]
    before, after = (decode_step(taken[0]) if len(taken) == 2 else None), decode_step(taken[-1])
    if before and before.between != after.between:
        before, after = (decode_step(trace, within=True) for trace in taken)
    if before and before.file == after.file:
        before, after = (replace(step, file=path) for step, path in zip((before, after), traces, strict=True))
    ops = tuple(change.op for change in changes) or ((alone.op,) if alone else _differing(before, after))
    if before and alone and (kernel := swapped(before, after, ops, alone)):
        where = f"runs in {before.file}, and not in {after.file}"
        raise UsageError(f"{kernel} of {alone.after} {where}: are the traces swapped?")
    found = changed(before, after, ops, alone)
    there = {kernel.op_class for step in (before, after) if step for kernel in step.kernels.values()}
    if missing := [op for op in ops if op not in there and not (found.old or found.new)]:
        raise UsageError(f"no kernel of {missing[0]} in {' or '.join(dict.fromkeys(traces))}")
    served = [of_trace(path) for path in traces]
    return Steps(
        before, after, ops, alone,
        fit=fit(alone, served_sizes(alone.op, served[-1]), after.file) if alone else None,
        unlike=unlike(*served) if before else "", log=log, sides=sides,
        changed=found, changes=tuple(changes),
    )  # fmt: skip


def _differing(before: DecodeStep | None, after: DecodeStep) -> tuple[str, ...]:
    """The op of the suite whose kernels differ most between the two."""
    differ: dict[str, float] = {}
    for one, other in ((before, after), (after, before)):
        for name, kernel in one.kernels.items() if one and other else ():
            if kernel.op_class in OPS and other and name not in other.kernels:
                differ[kernel.op_class] = differ.get(kernel.op_class, 0.0) + kernel.ms
    return (max(differ, key=lambda op: differ[op]),) if differ else ()


def modelled(
    record: str | None, before: Sequence[str], changes: Sequence[KernelChange], alone: Alone | None
) -> tuple[Prediction, ...]:
    """What the model predicts of the change under the client's load; nothing where the inputs do not say
    enough of the machine and the load for it."""
    wanted = list(changes) or ([alone.change] if alone else [])
    with contextlib.suppress(UsageError):
        if record and alone:
            return of_link(Record(Path(record)).plan, [alone.change])
        run = load(before[0])[0] if before and wanted else None
        if run and run.hardware:
            model = link(System(hardware=hardware_name(run.hardware), calibrate=tuple(before)))
            return predict(model, point_of(run).load, wanted)
    return ()
