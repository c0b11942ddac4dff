"""Fused MoE: the routed experts of one rank, and the shared expert where it is fused, as one layer.

    out[t] = sum_p weight[t, p] * (silu(x[t] @ gate[e]^T) * (x[t] @ up[e]^T)) @ w2[e]^T     e = id[t, p]

Weights are FP8 with a scale for each 128x128 block, activations FP8 with a scale for each 1x128 block
(DeepSeek-V3 technical report, sections 2.1.2 and 3.3). In the boundary `core` a call gets quantised
activations and the picks, in `with_quant` bf16 activations and the picks, in `with_routing` bf16 activations
and the router's logits. The router's GEMM is not part of any boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from kernels.formats import BLOCK, fp8_format, known_scales
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes, generate
from kernels.fused_moe.reference import reference, routing
from kernels.fused_moe.routing import Router, router
from kernels.lazy import torch
from kernels.op import BOUNDARIES, Call, Op, RowGroups, Tolerance, Work, rows_kept, sequence
from kernels.operands import Seeds
from kernels.quantise import quantiser


class FusedMoe(Op):
    name = "fused_moe"
    Sizes = FusedMoeSizes
    boundaries = BOUNDARIES
    unsaid = ("groups", "group_topk")
    baseline: ClassVar = dict.fromkeys(("cpu", "cuda", "rocm"), "torch.bf16")
    engine_like = "triton.grouped"  # not torch.bf16: a whole rank's weights in bf16 fit on no device
    turns = True
    axes = ("token", "column")
    operands = staticmethod(generate)
    reference = staticmethod(reference)

    def work(self, sizes: FusedMoeSizes, boundary: str = "core") -> Work:
        """6 * pairs * hidden * inter flops, of the pairs on this rank. The bytes are those of the experts
        that are hit, of x as this boundary takes it, of ids and weights (or logits and bias), and of the
        output. The dtype is FP8 in every boundary, because the call may quantise the activations itself."""
        routing = sizes.routed
        activations = sizes.quantised_bytes if boundary == "core" else 2 * sizes.tokens * sizes.hidden
        logits_and_bias, ids_and_weights = 4 * (sizes.tokens + 1) * sizes.experts, (4 + 4) * sizes.pairs
        choice = logits_and_bias if boundary == "with_routing" else ids_and_weights
        moved = routing.hit * sizes.expert_bytes + activations + choice + self.output_bytes(sizes)
        return Work(6.0 * routing.pairs * sizes.hidden * sizes.inter, float(moved), "fp8")

    def operand_bytes(self, sizes: FusedMoeSizes) -> int:
        """The weights; x in bf16, and what differs between sets."""
        x = 2 * sizes.tokens * sizes.hidden
        return sizes.local_experts * sizes.expert_bytes + x + self.turn_bytes(sizes)

    def output_shape(self, sizes: FusedMoeSizes) -> tuple[int, ...]:
        return sizes.tokens, sizes.hidden

    def streamed_bytes(self, sizes: FusedMoeSizes, turns: int = 1) -> int:
        """The bytes of the experts that so many calls touch."""
        return sizes.routed.touched(turns) * sizes.expert_bytes

    def turn_bytes(self, sizes: FusedMoeSizes) -> int:
        """The set's own picks and logits, and the activations in FP8 that `step` writes for it."""
        return sizes.pairs * 8 + sizes.tokens * sizes.experts * 4 + sizes.quantised_bytes

    def reference_bytes(self, sizes: FusedMoeSizes) -> int:
        """80 bytes for each value of x: x and two errors of it in fp32; a result and two variances in fp64,
        and intermediate results. As much again for the rows of an expert, and three times its w13 in fp32."""
        rows = rows_kept(sizes.tokens, sizes.hidden)
        rows += min(rows, sizes.routed.busiest)
        return sizes.hidden * (80 * rows + 3 * 4 * 2 * sizes.inter)

    def empty_operands(self, sizes: FusedMoeSizes, device: str) -> FusedMoeOperands:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        fp8 = fp8_format(sizes.fp8).dtype
        local_experts, hidden, inter = sizes.local_experts, sizes.hidden, sizes.inter
        return FusedMoeOperands(
            w13=empty(local_experts, 2 * inter, hidden, dtype=fp8),
            w13_scale=empty(local_experts, 2 * inter // BLOCK, hidden // BLOCK),
            w2=empty(local_experts, hidden, inter, dtype=fp8),
            w2_scale=empty(local_experts, hidden // BLOCK, inter // BLOCK),
            sizes=sizes,
            seeds=Seeds(),
            boundary="with_routing",
            x=empty(sizes.tokens, hidden, dtype=torch.bfloat16),
            logits=empty(sizes.tokens, sizes.experts),
            bias=empty(sizes.experts),
        )

    def step(self, operands: FusedMoeOperands, into: Mapping[str, torch.Tensor]) -> Call:
        """Routes or quantises. Operands that both boundaries have are copied where `into` has its own."""
        sizes: FusedMoeSizes = operands.sizes
        if operands.boundary == "with_routing":
            ids, weights = into["topk_ids"], into["topk_weights"]
            produce = router(operands.logits, operands.bias, ids, weights, Router.of(sizes))
            in_both: tuple[str, ...] = ("x",)
        elif operands.boundary == "with_quant":
            produce = quantiser(operands.x, into["x_q"], into["x_scale"], known_scales(sizes.scales))
            in_both = ("topk_ids", "topk_weights")
        else:
            return super().step(operands, into)
        copies = []
        for name in in_both:
            source, target = getattr(operands, name), into[name]
            if source.data_ptr() != target.data_ptr():
                copies.append(partial(target.copy_, source))
        return sequence(produce, *copies)

    def row_groups(self, operands: FusedMoeOperands) -> RowGroups:
        """The routed experts of each token on this rank; every token has the shared one."""
        ids, _ = routing(operands)
        return RowGroups("expert", torch.where(ids < operands.sizes.routed.local, ids, -1).cpu())

    def tolerance(self, sizes: FusedMoeSizes) -> Tolerance:
        """A segment is as wide as a block of weights, so that the error of one block is not diluted by
        others. The worst segments of 60 random cases (tests/kernels/fused_moe/right_arithmetic.py), with
        outliers, zero blocks and extreme scales, err by 1.1 sigma in bf16 and by 1.7 sigma_fp8; at R1's
        sizes, which have more segments, by 1.2 sigma and 0.7 sigma_fp8. Over the whole output right calls in
        FP8 err by 0.54 to 0.81 sigma_fp8, and calls with weights in e5m2 by at least 1.1 (mistakes.py)."""
        return Tolerance(row=2.0, element=10.0, segment=BLOCK, noise=1.0)
