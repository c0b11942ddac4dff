"""Runs an implementation of a narrow boundary in a wider one, behind the suite's own producer kernels."""

from __future__ import annotations

from kernels.lazy import torch
from kernels.op import Implementation, Op, Prepared, as_prepared
from kernels.operands import Operands


def bind(
    op: Op,
    implementation: Implementation,
    operands: Operands,
    out: torch.Tensor | None,
    first: Prepared | None = None,
) -> Prepared:
    """Prepares an implementation on operands of any boundary that it supports.

    first: what this returned for the first of the sets of operands that calls rotate over
    """
    if operands.boundary in implementation.boundaries:
        implementation.require()
        if first is None:
            given = implementation.prepare(operands, out)
        else:
            given = implementation.prepare_turn(first, operands, out)
        return as_prepared(given, f"{type(implementation).__name__}.prepare()", operands, out)
    return _Composed(op, implementation, operands, out, first)


class _Composed(Prepared):
    """A call of two parts: the step from the operands' boundary to the next narrower one, then the call of
    that boundary. The step writes directly into the tensors that the inner call reads, as an engine's fused
    producer does."""

    def __init__(
        self,
        op: Op,
        implementation: Implementation,
        operands: Operands,
        out: torch.Tensor | None,
        first: Prepared | None,
    ) -> None:
        super().__init__(operands, out)
        inner = operands.narrowed()
        # An implementation may read activations when it prepares, so they must have values.
        op.step(operands, inner.live_tensors())()
        inner_first = first.inner if isinstance(first, _Composed) else None
        self.inner: Prepared = bind(op, implementation, inner, out, inner_first)
        self.step = op.step(operands, self.inner.inputs())

    def call(self) -> None:
        self.step()
        self.inner.call()

    def result(self) -> torch.Tensor:
        return self.inner.result()

    def picked(self) -> str:
        return self.inner.picked()
