"""Binds an implementation of a narrow boundary in a wider one: the suite's own kernels do what it lacks."""

from __future__ import annotations

from kernels.lazy import torch
from kernels.op import Implementation, Op, Prepared, as_prepared, named, sequence
from kernels.operands import Operands


def bind(
    op: Op,
    implementation: Implementation,
    operands: Operands,
    out: torch.Tensor | None,
    first: Prepared | None = None,
) -> Prepared:
    """Prepares an implementation on operands of any boundary that it supports. In a wider boundary than its
    own, a call makes the step to the next narrower boundary (see `Op.step`), then the call of that boundary.
    first: what this function returned for the first of the sets that calls rotate over; None for that set"""
    if operands.boundary in implementation.boundaries:
        implementation.require()
        if first is None:
            returned = implementation.prepare(operands, out)
        else:
            returned = implementation.prepare_turn(first, operands, out)
        return as_prepared(returned, named(type(implementation).prepare), operands, out)
    narrowed = operands.narrowed()
    # An implementation may read activations when it prepares, so they must have values.
    op.step(operands, narrowed.live_tensors())()
    inner = bind(op, implementation, narrowed, out, first.inner if first else None)
    # The step writes directly into the tensors that the inner call reads, as an engine's fused producer does.
    call = sequence(op.step(operands, inner.inputs()), inner.call)
    composed = Prepared(operands, out, call, result=lambda _: inner.result(), picked=inner.picked)
    composed.inner = inner
    return composed
