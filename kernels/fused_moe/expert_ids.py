"""Expert ids in which picks of other ranks' experts are an id of their own, for libraries that take no -1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.fused_moe.operands import FusedMoeOperands


class ExpertIds:
    """The operands' ids, with -1 as one expert more than the rank has: what SGLang's `forward_aiter` and
    vLLM's expert map give to their kernels. Where no pick lies on another rank, the ids as they are.

    ids:   int32 [tokens, picks]: 0 .. local_experts, which stands for another rank
    write: brings `ids` up to date; a part of the timed call
    """

    def __init__(self, operands: FusedMoeOperands) -> None:
        import torch

        self.apart = operands.sizes.ep > 1
        self.ids = torch.empty_like(operands.topk_ids) if self.apart else operands.topk_ids
        self.write: Callable[[], object] = lambda: None
        if self.apart:
            # -1 modulo local_experts + 1 is local_experts, and no other id changes.
            self.write = lambda: torch.remainder(
                operands.topk_ids, operands.sizes.local_experts + 1, out=self.ids
            )

    def per_expert(self, values: list[int]) -> torch.Tensor | None:
        """int32 [local + 1] on the device of the ids; None where all are on this rank."""
        import torch

        return torch.tensor(values, dtype=torch.int32, device=self.ids.device) if self.apart else None
