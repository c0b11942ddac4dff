"""How tests judge what an implementation gave in a boundary: as the harness does."""

from collections.abc import Mapping
from typing import Any

import torch

import kernels
from harness.workers.child.judge import compare_output
from kernels.compose import bind
from kernels.op import Implementation, Op
from kernels.operands import Seeds
from tests.support.recorded import Case, Wrong, called, load
from tests.support.stand_ins import Answer


def given_to(op: Op, implementation: Implementation, operands: Any) -> Any:
    """The operands that the implementation's own call gets, after the suite's producer kernels."""
    while operands.boundary not in implementation.boundaries:
        inner = operands.narrowed()
        op.step(operands, inner.live_tensors())()
        operands = inner
    return operands


def judged(op: Op, implementation: Implementation, sizes: Any, operands: Any, out: torch.Tensor) -> dict:
    """The judge's report on an output that was computed from these operands."""
    reference = op.reference(given_to(op, implementation, operands))
    shape = tuple(op.empty_output(sizes, "meta").shape)
    return compare_output(out, reference, op.tolerance(sizes), shape, implementation.activations == "fp8")


def keep(case: Case, answers: Mapping[str, Answer]) -> None:
    """Raises Wrong where the row's output is not the op's, for two sets of live operands."""
    op, row = kernels.OPS[case.op], case.implementation
    with case.lent(answers=answers) as (here, _):
        sizes = case.sizes(here)
        operands = op.operands(sizes, Seeds(), "cpu", case.boundary)
        out = None if row.allocates else op.empty_output(sizes, "cpu").fill_(torch.nan)
        prepared = bind(op, row, operands, out)
        if op.turns:
            operands = operands.turned(1)
            prepared = bind(op, row, operands, out, prepared)
        for live in (0, 1):
            if live:
                load(prepared, operands, op.operands(sizes, Seeds(0, live), "cpu", case.boundary))
            if out is not None:
                out.fill_(torch.nan)
            called(operands, prepared)
            report = judged(op, row, sizes, operands, prepared.result())
            if not report["ok"]:
                raise Wrong(report["reason"])
