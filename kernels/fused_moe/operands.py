"""Operands of a fused MoE layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.formats import BLOCK
from kernels.fused_moe.picks import picks
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.lazy import torch
from kernels.operands import ABSENT, Operands, Seeds


@dataclass
class FusedMoeOperands(Operands):
    """local is sizes.local_experts, picks is sizes.picks, and FP8 is the format of sizes.fp8."""

    w13: torch.Tensor  # FP8 [local, 2 * inter, hidden], gate rows before up rows
    w13_scale: torch.Tensor  # fp32 [local, 2 * inter/128, hidden/128]
    w2: torch.Tensor  # FP8 [local, hidden, inter]
    w2_scale: torch.Tensor  # fp32 [local, hidden/128, inter/128]
    sizes: FusedMoeSizes
    seeds: Seeds
    boundary: str = "core"
    x: torch.Tensor = ABSENT  # bf16 [tokens, hidden]; not in core
    x_q: torch.Tensor = ABSENT  # FP8 [tokens, hidden]; core only
    x_scale: torch.Tensor = ABSENT  # fp32 [tokens, hidden/128]; core only

    logits: torch.Tensor = ABSENT
    """fp32 [tokens, experts] of the experts of all ranks, before the sigmoid; with_routing only."""

    bias: torch.Tensor = ABSENT
    """fp32 [experts], added to the scores only for the choice; with_routing only."""

    topk_ids: torch.Tensor = ABSENT
    """int32 [tokens, picks] in the rank's numbering, -1 for experts on other ranks; not in with_routing."""

    topk_weights: torch.Tensor = ABSENT
    """fp32 [tokens, picks], with the true weight also where the id is -1; not in with_routing."""

    live: ClassVar = ("x", "x_q", "x_scale", "logits", "topk_ids", "topk_weights")
    streamed: ClassVar = ("w13", "w13_scale", "w2", "w2_scale")

    @property
    def without_effect(self) -> frozenset[str]:
        """The weight of a single pick is 1 whatever its score, and other scores may choose the same
        expert."""
        return frozenset({"logits"} if self.sizes.topk == 1 else ())

    def turned(self, turn: int, cold: bool = False) -> FusedMoeOperands:
        """The same x and weights (`cold`: copies of them), and picks of other experts."""
        seeds = Seeds(self.seeds.stationary, self.seeds.live, turn)
        live = picks(self.sizes, seeds, str(self.w13.device), self.boundary)
        live.pop("bias", None)
        first = self.copy() if cold else self
        return first.replaced(seeds=seeds, **live)

    def narrowed(self) -> FusedMoeOperands:
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
