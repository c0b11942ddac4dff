"""The engine's FP8 experts, by an implementation of `fused_moe`: the same weights and the same routing."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from . import report
from .suite import Swapped, swapped

if TYPE_CHECKING:
    from kernels.fused_moe.operands import FusedMoeOperands
    from kernels.fused_moe.sizes import FusedMoeSizes


def apply(swap: str) -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    implementation = swapped(swap)
    # Weights are left as loaded: the implementation packs them at the first call, when scales are known.
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)

    def apply_experts(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *rest, **named):
        if not hasattr(self, "_kernel_bench_experts"):
            weights = (w1.data, self.w1_scale, w2.data, self.w2_scale)
            self._kernel_bench_experts = Experts(implementation, *weights, topk_ids.shape[1])
            report.note("replaced", swap=swap, layer=str(id(self)))
        self._kernel_bench_experts(output, hidden_states, topk_weights, topk_ids)

    cpu_moe.CPUExpertsFp8.apply = apply_experts


class Experts:
    """One layer's experts; weights as FusedMoeOperands has them."""

    def __init__(
        self,
        implementation: Swapped,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        topk: int,
    ) -> None:
        self.implementation = implementation
        self.weights = (w13, w13_scale.float().contiguous(), w2, w2_scale.float().contiguous())
        x = torch.zeros(1, w13.shape[2], dtype=torch.bfloat16)
        ids = torch.arange(topk, dtype=torch.int32)[None]
        self.first = implementation.prepare(self._operands(x, torch.ones(1, topk), ids))

    def __call__(self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Writes out bf16 [tokens, hidden]; x alike; weights, ids [tokens, picks]."""
        operands = self._operands(x, weights.float().contiguous(), ids.int().contiguous())
        result = self.implementation.run(self.first, operands, out)
        if result is not out:
            out.copy_(result)

    def _operands(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> FusedMoeOperands:
        from kernels.fused_moe.operands import FusedMoeOperands
        from kernels.operands import Seeds

        w13, _, w2, _ = self.weights
        sizes = _sizes(len(x), len(w13), ids.shape[1], w2.shape[1], w2.shape[2])
        return FusedMoeOperands(
            *self.weights,
            sizes,
            Seeds(),
            boundary="with_quant",
            x=x,
            topk_ids=ids,
            topk_weights=weights,
        )


@functools.cache
def _sizes(tokens: int, experts: int, topk: int, hidden: int, inter: int) -> FusedMoeSizes:
    from kernels.fused_moe.sizes import FusedMoeSizes

    return FusedMoeSizes(tokens, experts, topk, hidden, inter)
