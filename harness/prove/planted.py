"""What a catalogue holds: right kernels and wrong ones, as functions of a case's operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Compute = Callable[[Any, "torch.Tensor"], "torch.Tensor"]
"""(operands, a right output of them) -> an output; it may change a clone of the right one in one place."""


def _any(sizes: Any) -> bool:
    return True


@dataclass(frozen=True)
class Planted:
    """A kernel of the catalogue.

    name:        in words, unique within the op
    compute:     gives the whole output in its canonical shape and dtype
    right:       whether the check has to accept it
    boundary:    of the operands that it takes
    activations: as of an implementation: what it rounds activations to, bf16 or fp8
    truncates:   as of an implementation
    fits:        whether a case's sizes can show it
    source:      of a right one: the library's file and release whose arithmetic it is
    fine:        of a bug that lies within what the op's rounding explains: why; it is listed, not counted
    """

    name: str
    compute: Compute
    right: bool = False
    boundary: str = "core"
    activations: str = "bf16"
    truncates: bool = False
    fits: Callable[[Any], bool] = _any
    source: str = ""
    fine: str = ""
