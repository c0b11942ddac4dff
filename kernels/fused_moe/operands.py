"""Operands of a fused MoE layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernels.formats import BLOCK
from kernels.fused_moe.picks import picks
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.operands import ABSENT, Operands, Seeds

if TYPE_CHECKING:
    import torch


@dataclass
class FusedMoeOperands(Operands):
    """local = sizes.local_experts experts, picks = sizes.picks; FP8 in sizes.fp8.

    x             bf16 [tokens, hidden]; None in `core`
    x_q, x_scale  FP8 [tokens, hidden], fp32 [tokens, hidden/128]; `core` only
    logits        fp32 [tokens, experts] of all ranks' experts, before the sigmoid; `with_routing` only
    bias          fp32 [experts], added to the scores for the choice only; `with_routing` only
    topk_ids      int32 [tokens, picks] in the rank's numbering, -1 where the expert is on another rank;
                  None in `with_routing`
    topk_weights  fp32 [tokens, picks], true also where the id is -1; None in `with_routing`
    w13           FP8 [local, 2 * inter, hidden], gate rows before up rows
    w13_scale     fp32 [local, 2 * inter/128, hidden/128]
    w2, w2_scale  FP8 [local, hidden, inter], fp32 [local, hidden/128, inter/128]
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    sizes: FusedMoeSizes
    seeds: Seeds
    boundary: str = "core"
    x: torch.Tensor = ABSENT
    x_q: torch.Tensor = ABSENT
    x_scale: torch.Tensor = ABSENT
    logits: torch.Tensor = ABSENT
    bias: torch.Tensor = ABSENT
    topk_ids: torch.Tensor = ABSENT
    topk_weights: torch.Tensor = ABSENT

    @property
    def without_effect(self) -> frozenset[str]:
        """Of a single pick the weight is 1 whatever its score, and other scores may choose the same."""
        return frozenset({"logits"} if self.sizes.topk == 1 else ())

    live: ClassVar = ("x", "x_q", "x_scale", "logits", "topk_ids", "topk_weights")
    streamed: ClassVar = ("w13", "w13_scale", "w2", "w2_scale")

    def turned(self, turn: int, cold: bool = False) -> FusedMoeOperands:
        """The same x and weights (`cold`: copies of them), and picks of other experts."""
        seeds = Seeds(self.seeds.stationary, self.seeds.live, turn)
        live = picks(self.sizes, seeds, str(self.w13.device), self.boundary)
        live.pop("bias", None)
        first = self.copy() if cold else self
        return first.replaced(seeds=seeds, **live)

    def narrowed(self) -> FusedMoeOperands:
        import torch

        sizes, device = self.sizes, self.w13.device
        if self.boundary == "with_routing":
            shape = (sizes.tokens, sizes.picks)
            return self.replaced(
                boundary="with_quant",
                logits=None,
                bias=None,
                topk_ids=torch.empty(shape, dtype=torch.int32, device=device),
                topk_weights=torch.empty(shape, device=device),
            )
        if self.boundary == "with_quant":
            return self.replaced(
                boundary="core",
                x=None,
                x_q=torch.empty_like(self.x, dtype=self.w13.dtype),
                x_scale=torch.empty(sizes.tokens, sizes.hidden // BLOCK, device=device),
            )
        return super().narrowed()
