"""Picks of other ranks' experts, for libraries that take a mask or a map of experts instead of -1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.fused_moe.operands import FusedMoeOperands


class Renumbered:
    """The operands' ids, with -1 as one expert more than the rank holds: what SGLang's `forward_aiter` and
    vLLM's expert map give to their kernels. Where no pick lies on another rank, the ids as they are.

    ids:   int32 [tokens, picks]: 0 .. held, where `held` is elsewhere
    write: brings `ids` up to date; a part of the timed call
    """

    def __init__(self, operands: FusedMoeOperands) -> None:
        import torch

        self.apart = operands.sizes.ep > 1
        self.ids = torch.empty_like(operands.topk_ids) if self.apart else operands.topk_ids
        self.write: Callable[[], object] = lambda: None
        if self.apart:
            # -1 modulo held + 1 is held, and no other id changes.
            self.write = lambda: torch.remainder(operands.topk_ids, operands.sizes.held + 1, out=self.ids)

    def per_expert(self, values: list[int]) -> torch.Tensor | None:
        """int32 [held + 1] on the device of the ids; None where none is elsewhere."""
        import torch

        return torch.tensor(values, dtype=torch.int32, device=self.ids.device) if self.apart else None
