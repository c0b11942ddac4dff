"""Wrong arithmetic of an op: what `kernels/<op>/mistakes.py` is a list of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Compute = Callable[[Any, "torch.Tensor"], "torch.Tensor"]


def any_size(sizes: Any) -> bool:
    return True


@dataclass(frozen=True)
class Mistake:
    """A kernel that is wrong in one way, in plain torch.

    name:        says the mistake in words, unique within the op
    compute:     (operands, right) -> the output, in the op's shape and dtype, on the operands' device. right
                 is a right output, which it may change and return: many are wrong in one place only
    boundary:    of the operands that it takes
    activations: what it rounds activations to, bf16 or fp8; decides the sigma that it is judged by
    truncates:   whether it rounds to bf16 toward zero, which also decides that
    fits:        whether the mistake shows at a case's sizes
    """

    name: str
    compute: Compute
    boundary: str = "core"
    activations: str = "bf16"
    truncates: bool = False
    fits: Callable[[Any], bool] = any_size
