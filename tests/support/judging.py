"""How tests judge what an implementation gave in a boundary: as the harness does."""

from __future__ import annotations

from typing import Any

import torch

from harness.workers.child.judge import judge
from kernels.op import Implementation, Op


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
    return judge(out, reference, op.tolerance(sizes), shape, implementation.activations == "fp8")
