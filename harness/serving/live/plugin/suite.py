"""The suite's implementations inside an engine's process: found by name, bound to the engine's tensors."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, cast

from . import report

if TYPE_CHECKING:
    import torch

    from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
    from kernels.fused_moe.operands import FusedMoeOperands
    from kernels.mha_prefill.operands import MhaPrefillOperands
    from kernels.mla_decode.operands import MlaDecodeOperands
    from kernels.op import Implementation, Prepared

    Operands = BlockScaleGemmOperands | FusedMoeOperands | MhaPrefillOperands | MlaDecodeOperands


def swapped(swap: str) -> Swapped:
    """The implementation that `OP[:PLACE]=IMPLEMENTATION` names. Raises LookupError where there is none."""
    place, _, name = swap.partition("=")
    op = place.partition(":")[0]
    for implementation in _kernels().implementations(op):
        if implementation.name == name:
            return Swapped(swap, implementation)
    raise LookupError(f"{op} has no implementation {name}")


def _kernels() -> ModuleType:
    """This suite's package, also where Hugging Face's of the same name was imported before it."""
    folder = os.environ.get("KERNEL_BENCH_SUITE")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
            del sys.modules[name]
    suite = importlib.import_module("kernels")
    suite.import_plugins()
    return suite


class Swapped:
    """An implementation in place of an engine's op."""

    def __init__(self, swap: str, implementation: Implementation) -> None:
        self.swap, self.implementation = swap, implementation

    def prepare(self, operands: Operands, out: torch.Tensor | None = None) -> Prepared:
        """Of a layer, or of a step: what is made of its stationary operands is kept in what this returns.
        Raises ValueError where the implementation does not take these sizes."""
        support = self.implementation.fits(operands.sizes)
        if not support.ok:
            raise ValueError(f"{self.swap}: {support.reason}")
        own = out is None or self.implementation.allocates
        return self.implementation.prepare(
            operands, cast("torch.Tensor", self._out(operands) if own else out)
        )

    def run(self, first: Prepared, operands: Operands, out: torch.Tensor | None = None) -> torch.Tensor:
        """The op on operands whose stationary ones are those of `first`; its result, in `out` unless the
        implementation allocates its own."""
        if out is None:
            out = self._out(operands)
        elif self.implementation.allocates:
            out = None
        target = cast("torch.Tensor", out)  # None only for who allocates, whose `prepare` takes None
        return self._result(self.implementation.prepare_turn(first, operands, target))

    def run_once(self, operands: Operands, out: torch.Tensor) -> torch.Tensor:
        """The op where no operand is stationary; its result, as `run` has it."""
        return self._result(self.prepare(operands, out))

    def _result(self, prepared: Prepared) -> torch.Tensor:
        report.called(self.swap)
        prepared.call()
        return prepared.result()

    def _out(self, operands: Operands) -> torch.Tensor | None:
        if self.implementation.allocates:
            return None
        return _kernels().OPS[self.implementation.op].empty_output(operands.sizes, "cpu")
