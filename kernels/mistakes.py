"""What `kernels/<op>/mistakes.py` lists: kernels that are wrong in one way each, as data for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Compute = Callable[[Any, "torch.Tensor"], "torch.Tensor"]
"""(operands, right output) -> wrong output, in the op's shape and dtype, on the operands' device. It may
change and return the right output, as many kernels are wrong in one place only."""


def any_size(sizes: Any) -> bool:
    return True


def put(x: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    """Returns a copy of x with another value at an index."""
    x = x.clone()
    x[at] = value
    return x


@dataclass(frozen=True)
class Mistake:
    """A kernel that is wrong in one way, in plain torch."""

    name: str
    """Says what is wrong; unique within the op."""

    compute: Compute

    boundary: str = "core"
    """The boundary of the operands that it takes."""

    activations: str = "bf16"
    """The format that it rounds activations to, bf16 or fp8. The tolerance depends on it."""

    truncates: bool = False
    """Whether it rounds to bf16 toward zero. The tolerance depends on this, too."""

    fits: Callable[[Any], bool] = any_size
    """Whether the mistake changes the output at the sizes of a case."""
