"""Fused MoE: the routed experts of one rank, and the shared one where it is fused, as one layer.

    out[t] = sum_p weight[t, p] * (silu(x[t] @ gate[e]^T) * (x[t] @ up[e]^T)) @ w2[e]^T     e = id[t, p]

Weights are FP8 with 128x128 block scales, activations FP8 with 1x128 (DeepSeek-V3 technical report,
sections 2.1.2 and 3.3). Boundary `core` takes quantised activations and the picks, `with_quant` bf16
activations, `with_routing` the router's logits as well; the router's GEMM is not part of any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from kernels.formats import BLOCK, SCALES, Scales, fp8_format, native
from kernels.op import BOUNDARIES, Op, Reference, Tolerance, Work
from kernels.operands import Operands, Seeds
from shapes.routing import Routing

if TYPE_CHECKING:
    import torch

SCALING = 2.5
"""Of the routed weights after they were normalised (config_671B.json: route_scale)."""


@dataclass(frozen=True)
class Sizes:
    """tokens: rows of the rank's kernel; experts: routed ones of the layer; topk: that a token picks;
    hidden, inter: of an expert on this rank, multiples of 128 (engines refuse others: gate and up would
    share a scale); ep: ranks that share the experts; shared: 1 if the shared expert is fused as one more;
    routing: a pattern of shapes.routing; fp8: e4m3fn or e4m3fnuz; scales: fp32, or ue8m0 for powers of
    two."""

    tokens: int
    experts: int = 256
    topk: int = 8
    hidden: int = 7168
    inter: int = 256
    ep: int = 1
    shared: int = 0
    routing: str = "balanced"
    fp8: str = "e4m3fn"
    scales: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("hidden", "inter"):
            value = getattr(self, name)
            if value < 1 or value % BLOCK:
                raise ValueError(f"size {name}={value} of fused_moe must be a multiple of {BLOCK}")
        fp8_format(self.fp8)
        if self.scales not in SCALES:
            raise ValueError(f"size scales={self.scales!r} of fused_moe must be {' or '.join(SCALES)}")
        self.routed  # noqa: B018 - raises for what no routing has

    @cached_property
    def routed(self) -> Routing:
        return Routing(self.tokens, self.experts, self.topk, self.ep, self.shared, self.routing)

    @property
    def held(self) -> int:
        """Experts of the rank, the shared one last."""
        return self.routed.local + self.shared

    @property
    def picks(self) -> int:
        """Of a token, the shared expert included."""
        return self.topk + self.shared

    @property
    def group_limit(self) -> tuple[int, int]:
        """(groups, those that the picks of a token lie in): (1, 1) where groups do not divide the experts."""
        routing = self.routed
        if self.experts % routing.groups:
            return 1, 1
        return routing.groups, min(routing.group_topk, routing.groups)

    @property
    def expert_bytes(self) -> int:
        """One expert: w13 and w2 in FP8, their scales in fp32."""
        values = 3 * self.hidden * self.inter
        return values + values // BLOCK**2 * 4


@dataclass
class FusedMoeOperands(Operands):
    """held = sizes.held experts, picks = sizes.picks; FP8 in sizes.fp8.

    x             bf16 [tokens, hidden]; None in `core`
    x_q, x_scale  FP8 [tokens, hidden], fp32 [tokens, hidden/128]; `core` only
    logits        fp32 [tokens, experts] of all ranks' experts, before the sigmoid; `with_routing` only
    bias          fp32 [experts], added to the scores for the choice only; `with_routing` only
    topk_ids      int32 [tokens, picks] in the rank's numbering, -1 where the expert is on another rank;
                  None in `with_routing`
    topk_weights  fp32 [tokens, picks], true also where the id is -1; None in `with_routing`
    w13           FP8 [held, 2 * inter, hidden], gate rows before up rows
    w13_scale     fp32 [held, 2 * inter/128, hidden/128]
    w2, w2_scale  FP8 [held, hidden, inter], fp32 [held, hidden/128, inter/128]
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    sizes: Sizes
    seeds: Seeds
    boundary: str = "core"
    x: torch.Tensor | None = None
    x_q: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None

    live: ClassVar = ("x", "x_q", "x_scale", "logits", "topk_ids", "topk_weights")
    streamed: ClassVar = ("w13", "w13_scale", "w2", "w2_scale")

    def turned(self, turn: int, cold: bool = False) -> FusedMoeOperands:
        """The same x and weights (`cold`: copies of them), and picks of other experts."""
        from kernels.fused_moe.making import picks

        seeds = Seeds(self.seeds.stationary, self.seeds.live, turn)
        chosen = picks(self.sizes, seeds, str(self.w13.device), self.boundary)
        chosen.pop("bias", None)
        first = self.copy() if cold else self
        return first.replaced(seeds=seeds, **chosen)

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


class FusedMoe(Op):
    name = "fused_moe"
    Sizes = Sizes
    boundaries = BOUNDARIES
    baseline: ClassVar = dict.fromkeys(("cpu", "cuda", "rocm"), "torch.bf16")
    engine_like = "triton.grouped"  # dequantised weights of a whole rank fit no device
    turns = True

    def defaults(self, arch: str) -> Mapping[str, Any]:
        return {"fp8": native(arch), "scales": "ue8m0" if arch == "sm_100" else "fp32"}

    def work(self, sizes: Sizes, boundary: str = "core") -> Work:
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

    def operand_bytes(self, sizes: Sizes) -> int:
        """The weights; x in bf16, and quantised where a step does that; picks and logits."""
        x = sizes.tokens * sizes.hidden
        choice = sizes.tokens * (sizes.picks * 8 + sizes.experts * 4)
        return sizes.held * sizes.expert_bytes + 3 * x + x // BLOCK * 4 + choice

    def output_bytes(self, sizes: Sizes) -> int:
        return sizes.tokens * sizes.hidden * 2

    def streamed_bytes(self, sizes: Sizes, turns: int = 1) -> int:
        """Of the experts that so many calls touch."""
        return sizes.routed.touched(turns) * sizes.expert_bytes

    def turn_bytes(self, sizes: Sizes) -> int:
        """Picks or logits of its own, and what a step writes into when a call is composed."""
        x = sizes.tokens * sizes.hidden
        return sizes.tokens * (sizes.picks * 8 + sizes.experts * 4) + x + x // BLOCK * 4

    def empty_output(self, sizes: Sizes, device: str) -> torch.Tensor:
        import torch

        return torch.empty(sizes.tokens, sizes.hidden, dtype=torch.bfloat16, device=device)

    def operands(self, sizes: Sizes, seeds: Seeds, device: str, boundary: str = "core") -> FusedMoeOperands:
        """See kernels.fused_moe.making."""
        from kernels.fused_moe.making import activations, picks, weights

        first = Seeds(seeds.stationary, seeds.live)
        return FusedMoeOperands(
            **weights(sizes, first, device),
            **activations(sizes, first, device, boundary),
            **picks(sizes, first, device, boundary),
            sizes=sizes,
            seeds=first,
            boundary=boundary,
        )

    def empty_operands(self, sizes: Sizes, device: str) -> FusedMoeOperands:
        from functools import partial

        import torch

        empty = partial(torch.empty, device=device)
        fp8 = partial(empty, dtype=fp8_format(sizes.fp8).dtype)
        held, hidden, inter = sizes.held, sizes.hidden, sizes.inter
        return FusedMoeOperands(
            w13=fp8(held, 2 * inter, hidden),
            w13_scale=empty(held, 2 * inter // BLOCK, hidden // BLOCK),
            w2=fp8(held, hidden, inter),
            w2_scale=empty(held, hidden // BLOCK, inter // BLOCK),
            sizes=sizes,
            seeds=Seeds(),
            boundary="with_routing",
            x=empty(sizes.tokens, hidden, dtype=torch.bfloat16),
            logits=empty(sizes.tokens, sizes.experts),
            bias=empty(sizes.experts),
        )

    def step(self, operands: FusedMoeOperands, into: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Routing, or quantising. What both boundaries have is copied where the inner call keeps it apart."""
        sizes: Sizes = operands.sizes
        if operands.boundary == "with_routing":
            from kernels.fused_moe.route import Router, router

            rule = Router(*sizes.group_limit, sizes.topk, SCALING, sizes.routed.local, sizes.shared)
            produce = router(operands.logits, operands.bias, into["topk_ids"], into["topk_weights"], rule)
            same = ("x",)
        elif operands.boundary == "with_quant":
            from kernels.quantise import quantiser

            scales: Scales = sizes.scales  # type: ignore[assignment]
            produce = quantiser(operands.x, into["x_q"], into["x_scale"], scales)
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

    def reference(self, operands: FusedMoeOperands, max_flops: float = float("inf")) -> Reference:
        """See kernels.fused_moe.reference."""
        from kernels.fused_moe.reference import reference

        return reference(operands, max_flops)

    def tolerance(self, sizes: Sizes) -> Tolerance:
        """A segment is as wide as a weight block, so that one block is not diluted by the others. The
        worst of 60 random cases, with outliers, zero blocks and extreme scales: 1.1 sigma in bf16, 1.7 of
        sigma_fp8 (tests/test_check_fused_moe.py); 1.2 and 0.7 at R1's sizes, where maxima are of more."""
        return Tolerance(row=2.0, element=10.0, segment=BLOCK)
