"""The inputs of an account, read: traces, what clients and servers said, and what the model predicts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.explain.alone import Alone
from harness.explain.causes import Steps
from harness.explain.served import Log, fit, served_sizes
from harness.explain.sides import Sides, of_record, of_results
from harness.explain.step import DecodeStep, changed, decode_step
from harness.serving.ab.record import Record
from harness.serving.ab.result import of_link
from harness.serving.ledger import KernelChange, Prediction
from kernels import OPS


def read_sides(record: str | None, name: str, before: Sequence[str], after: Sequence[str]) -> Sides:
    """Raises UsageError."""
    if record:
        return of_record(Path(record), name)
    return of_results(before, after) if before else Sides("")


def read_steps(
    traces: Sequence[str], changes: Sequence[KernelChange], alone: Alone | None, sides: Sides, log: Log
) -> Steps | None:
    """Of one trace, that with the change, or of both. Raises UsageError."""
    if not traces:
        return None
    steps = [decode_step(path) for path in traces]
    before, after = (steps[0] if len(steps) == 2 else None), steps[-1]
    ops = [change.op for change in changes] or ([alone.op] if alone else _ops(before, after))
    fits = None
    if alone:
        fits = fit(alone, *served_sizes(alone.op, after.path, log.files))
    found = changed(before, after, ops, alone)
    return Steps(before, after, tuple(ops), alone, fits, log, sides, found, tuple(changes))


def _ops(before: DecodeStep | None, after: DecodeStep) -> list[str]:
    """The ops of the suite whose kernels differ most between the two."""
    if before is None:
        return []
    differ: dict[str, float] = {}
    for one, other in ((before, after), (after, before)):
        for name, kernel in one.kernels.items():
            if kernel.op_class in OPS and name not in other.kernels:
                differ[kernel.op_class] = differ.get(kernel.op_class, 0.0) + kernel.ms
    return sorted(differ, key=lambda op: -differ[op])[:1]


def modelled(
    record: str | None, before: Sequence[str], changes: Sequence[KernelChange], alone: Alone | None
) -> tuple[Prediction, ...]:
    """What the model of serving predicts of the change under the client's load; nothing where the inputs do
    not say enough of the machine and the load for it."""
    wanted = list(changes) or ([alone.change] if alone else [])
    if not wanted:
        return ()
    with contextlib.suppress(UsageError):
        if record and alone:
            return of_link(Record(Path(record)).plan, [alone.change])
        if before:
            from harness.serving.clients.load import load
            from harness.serving.link.load import Load
            from harness.serving.link.model import System, link
            from harness.serving.link.predictions import predict

            asked = load(before[0])[0].workload
            isl, osl = asked.input_len, asked.output_len
            if isl and osl and asked.concurrency:
                offered = Load(round(isl), round(osl), round(asked.concurrency), range_ratio=1.0)
                return predict(link(System(calibrate=tuple(before))), offered, wanted)
    return ()
