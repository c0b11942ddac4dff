"""Composition: a kernel of a narrower boundary in a wider one, after the suite's own producer kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.op import Implementation, Op, Prepared, as_prepared
from kernels.operands import Operands

if TYPE_CHECKING:
    import torch


def bind(
    op: Op,
    implementation: Implementation,
    operands: Operands,
    out: torch.Tensor | None,
    first: Prepared | None = None,
) -> Prepared:
    """Prepares an implementation on operands of any boundary that it supports; `first` is what it gave
    for the first of the sets that calls rotate over."""
    if operands.boundary in implementation.boundaries:
        implementation.require()
        if first is None:
            given = implementation.prepare(operands, out)
        else:
            given = implementation.prepare_turn(first, operands, out)
        return as_prepared(given, f"{type(implementation).__name__}.prepare()", operands, out)
    return _Composed(op, implementation, operands, out, first)


class _Composed(Prepared):
    """The step from the operands' boundary to the next narrower one, then what is bound there. The step
    writes straight into the layout that the inner call reads, as an engine's fused producer does."""

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
        # Whoever looks at live values when preparing shall find some.
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
