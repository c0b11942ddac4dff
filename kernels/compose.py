"""Composition: a kernel of a narrower boundary in a wider one, after the suite's own producer kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kernels.op import Implementation, Op, Prepared

if TYPE_CHECKING:
    import torch


def bind(
    op: Op, implementation: Implementation, operands: Any, out: torch.Tensor | None, first: Any = None
) -> Prepared:
    """Prepares an implementation on operands of any boundary that it supports; `first` is what it gave
    for the first of the sets that calls rotate over."""
    if operands.boundary in implementation.boundaries:
        target = cast("torch.Tensor", out)  # None only for who allocates, whose `prepare` takes None
        if first is None:
            return implementation.prepare(operands, target)
        return implementation.prepare_turn(first, operands, target)
    return _Composed(op, implementation, operands, out, first)


class _Composed(Prepared):
    """The step from the operands' boundary to the next narrower one, then what is bound there. The step
    writes straight into the layout that the inner call reads, as an engine's fused producer does."""

    def __init__(
        self, op: Op, implementation: Implementation, operands: Any, out: torch.Tensor | None, first: Any
    ) -> None:
        super().__init__(operands, out)
        inner = operands.narrowed()
        # Whoever looks at live values when preparing shall find some.
        op.step(operands, inner.live_tensors())()
        self.inner = bind(op, implementation, inner, out, first and first.inner)
        self.step = op.step(operands, self.inner.inputs())

    def call(self) -> None:
        self.step()
        self.inner.call()

    def result(self) -> torch.Tensor:
        return self.inner.result()

    def picked(self) -> str:
        return self.inner.picked()
