"""Fused MoE: the routed experts of one rank, and the shared one where it is fused, as one layer.

    out[t] = sum_p weight[t, p] * (silu(x[t] @ gate[e]^T) * (x[t] @ up[e]^T)) @ w2[e]^T     e = id[t, p]

Weights are FP8 with 128x128 block scales, activations FP8 with 1x128 (DeepSeek-V3 technical report,
sections 2.1.2 and 3.3). Boundary `core` takes quantised activations and the picks, `with_quant` bf16
activations, `with_routing` the router's logits as well; the router's GEMM is not part of any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from kernels.formats import BLOCK, fp8_format, known_scales, native, native_scales
from kernels.fused_moe.generate import generate
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.reference import reference, routing
from kernels.fused_moe.routing import Router, router
from kernels.fused_moe.sizes import SCALING, FusedMoeSizes
from kernels.op import BOUNDARIES, Op, Reference, RowGroups, Tolerance, Work, rows_kept
from kernels.operands import Seeds
from kernels.quantise import quantiser
from shapes.case import Size

if TYPE_CHECKING:
    import torch


class FusedMoe(Op):
    name = "fused_moe"
    Sizes = FusedMoeSizes
    boundaries = BOUNDARIES
    baseline: ClassVar = dict.fromkeys(("cpu", "cuda", "rocm"), "torch.bf16")
    engine_like = "triton.grouped"  # dequantised weights of a whole rank fit no device
    turns = True
    axes = ("token", "column")
    sums = True

    def defaults(self, arch: str) -> Mapping[str, Size]:
        return {"fp8": native(arch), "scales": native_scales(arch)}

    def work(self, sizes: FusedMoeSizes, boundary: str = "core") -> Work:
        """6 * pairs * hidden * inter flops of the pairs on this rank. Bytes of the experts that are hit, of
        x as this boundary takes it, of ids and weights (or of logits and bias), and of out. Products are of
        FP8 operands: weights by definition, activations as the call may quantise them."""
        routing = sizes.routed
        x = sizes.tokens * sizes.hidden
        activations = x + x // BLOCK * 4 if boundary == "core" else 2 * x
        if boundary == "with_routing":
            choice = (sizes.tokens + 1) * sizes.experts * 4
        else:
            choice = sizes.tokens * sizes.picks * 8
        moved = routing.hit * sizes.expert_bytes + activations + choice + self.output_bytes(sizes)
        return Work(6.0 * routing.pairs * sizes.hidden * sizes.inter, float(moved), "fp8")

    def operand_bytes(self, sizes: FusedMoeSizes) -> int:
        """The weights; x in bf16, and quantised where a step does that; picks and logits."""
        x = sizes.tokens * sizes.hidden
        choice = sizes.tokens * (sizes.picks * 8 + sizes.experts * 4)
        return sizes.local_experts * sizes.expert_bytes + 3 * x + x // BLOCK * 4 + choice

    def output_bytes(self, sizes: FusedMoeSizes) -> int:
        return sizes.tokens * sizes.hidden * 2

    def streamed_bytes(self, sizes: FusedMoeSizes, turns: int = 1) -> int:
        """Of the experts that so many calls touch."""
        return sizes.routed.touched(turns) * sizes.expert_bytes

    def turn_bytes(self, sizes: FusedMoeSizes) -> int:
        """Picks or logits of its own, and what a step writes into when a call is composed."""
        x = sizes.tokens * sizes.hidden
        return sizes.tokens * (sizes.picks * 8 + sizes.experts * 4) + x + x // BLOCK * 4

    def reference_bytes(self, sizes: FusedMoeSizes) -> int:
        """x and two errors of it in fp32, a result and two variances in fp64, and their sums; of the rows
        that one expert gets about as much again; an expert in fp32, with its squares."""
        rows = rows_kept(sizes.tokens, sizes.hidden)
        rows += min(rows, sizes.routed.busiest)
        return sizes.hidden * (80 * rows + 3 * 4 * 2 * sizes.inter)

    def empty_output(self, sizes: FusedMoeSizes, device: str) -> torch.Tensor:
        import torch

        return torch.empty(sizes.tokens, sizes.hidden, dtype=torch.bfloat16, device=device)

    def operands(
        self, sizes: FusedMoeSizes, seeds: Seeds, device: str, boundary: str = "core"
    ) -> FusedMoeOperands:
        return generate(sizes, seeds, device, boundary)

    def empty_operands(self, sizes: FusedMoeSizes, device: str) -> FusedMoeOperands:
        from functools import partial

        import torch

        empty = partial(torch.empty, device=device)
        fp8 = partial(empty, dtype=fp8_format(sizes.fp8).dtype)
        local_experts, hidden, inter = sizes.local_experts, sizes.hidden, sizes.inter
        return FusedMoeOperands(
            w13=fp8(local_experts, 2 * inter, hidden),
            w13_scale=empty(local_experts, 2 * inter // BLOCK, hidden // BLOCK),
            w2=fp8(local_experts, hidden, inter),
            w2_scale=empty(local_experts, hidden // BLOCK, inter // BLOCK),
            sizes=sizes,
            seeds=Seeds(),
            boundary="with_routing",
            x=empty(sizes.tokens, hidden, dtype=torch.bfloat16),
            logits=empty(sizes.tokens, sizes.experts),
            bias=empty(sizes.experts),
        )

    def step(self, operands: FusedMoeOperands, into: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Routing, or quantising. What both boundaries have is copied where the inner call keeps it apart."""
        sizes: FusedMoeSizes = operands.sizes
        if operands.boundary == "with_routing":
            rule = Router(*sizes.group_limit, sizes.topk, SCALING, sizes.routed.local, sizes.shared)
            produce = router(operands.logits, operands.bias, into["topk_ids"], into["topk_weights"], rule)
            same: tuple[str, ...] = ("x",)
        elif operands.boundary == "with_quant":
            produce = quantiser(operands.x, into["x_q"], into["x_scale"], known_scales(sizes.scales))
            same = ("topk_ids", "topk_weights")
        else:
            return super().step(operands, into)
        sources = [(getattr(operands, name), into[name]) for name in same]
        copies = [(source, target) for source, target in sources if source.data_ptr() != target.data_ptr()]

        def step() -> None:
            produce()
            for source, target in copies:
                target.copy_(source)

        return step

    def row_groups(self, operands: FusedMoeOperands) -> RowGroups:
        """The experts of each token on this rank. The shared one, which has every token, tells nothing."""
        import torch

        ids = routing(operands)[0].cpu()
        return RowGroups("expert", torch.where(ids < operands.sizes.routed.local, ids, -1))

    def reference(
        self, operands: FusedMoeOperands, max_flops: float = float("inf"), offset: float = 0.0
    ) -> Reference:
        return reference(operands, max_flops, offset)

    def tolerance(self, sizes: FusedMoeSizes) -> Tolerance:
        """A segment is as wide as a weight block, so that one block is not diluted by the others. The
        worst of 60 random cases, with outliers, zero blocks and extreme scales: 1.1 sigma in bf16, 1.7 of
        sigma_fp8 (its right_arithmetic.py); 1.2 and 0.7 at R1's sizes, where maxima are of more.
        Over the whole output right calls in FP8 err by 0.54 to 0.81 sigma, weights in e5m2 by 1.1 or more
        (mistakes.py)."""
        return Tolerance(row=2.0, element=10.0, segment=BLOCK, noise=1.0)
