"""Operands of a fused MoE layer, with values on which the usual mistakes show at any size.

All experts take their weights from one pool of quantised normal values, each from a different place: no two
rows are equal, and R1's 1.4 GB take about a second. Only scales are drawn for each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.formats import BLOCK, fp8_format, known_scales, quantise_activations
from kernels.fused_moe.picks import generator_of, picks
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.lazy import torch
from kernels.operands import ABSENT, Operands, Seeds, draw_normal


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


STRIDE = 4099
"""Values between the places where two experts begin in the pool: a prime, so that no two rows are aligned."""

GATE = 3.0
"""Root mean square of gate and up for a token of deviation 1: there SiLU is neither linear nor saturated."""

HOT = 8
"""In every second token one of so many blocks of K is hot."""


def generate(sizes: FusedMoeSizes, seeds: Seeds, device: str, boundary: str = "core") -> FusedMoeOperands:
    """The operands of a case, of the first of the sets that calls rotate over; equal arguments give equal
    operands."""
    first = Seeds(seeds.stationary, seeds.live, adversarial=seeds.adversarial)
    return FusedMoeOperands(
        **weights(sizes, first, device),
        **activations(sizes, first, device, boundary),
        **picks(sizes, first, device, boundary),
        sizes=sizes,
        seeds=first,
        boundary=boundary,
    )


def weights(sizes: FusedMoeSizes, seeds: Seeds, device: str) -> dict[str, torch.Tensor]:
    """w13, w13_scale, w2 and w2_scale. Codes are those of normal values whose largest in a block of 128x128
    is about four deviations. The scales of neighbouring blocks along K, along N and of the next expert differ
    by a factor of 2 to 8. No two scales of an expert are equal, unless they have to be powers of two."""
    generator = generator_of(device, 1, seeds.stationary)
    fmt = fp8_format(sizes.fp8)
    local_experts, hidden, inter = sizes.local_experts, sizes.hidden, sizes.inter
    shapes = {"w13": (2 * inter, hidden), "w2": (hidden, inter)}
    pool = torch.empty(2 * inter * hidden + 2 * local_experts * STRIDE, device=device)
    pool.normal_(0, fmt.max / 4, generator=generator)
    pool = pool.clamp_(-fmt.max, fmt.max).to(fmt.dtype)
    made = {}
    for place, (name, (rows, columns)) in enumerate(shapes.items()):
        values = torch.empty(local_experts, rows, columns, dtype=fmt.dtype, device=device)
        for expert in range(local_experts):
            start = (place * local_experts + expert) * STRIDE
            values[expert].view(-1).copy_(pool[start : start + rows * columns])
        size = (GATE if name == "w13" else 1.0) / (columns**0.5 * fmt.max / 4)
        made[name] = values
        made[f"{name}_scale"] = _scales(local_experts, rows, columns, size, sizes.scales, generator, device)
    return made


def _scales(
    local_experts: int,
    rows: int,
    columns: int,
    size: float,
    kind: str,
    generator: torch.Generator,
    device: str,
) -> torch.Tensor:
    """fp32 [local, rows/128, columns/128] with a root mean square of about `size`: low and high scales as the
    fields of a chessboard, 1 to 2 and 4 to 8 times the lowest."""
    shape = (local_experts, rows // BLOCK, columns // BLOCK)
    exponent = torch.rand(shape, generator=generator, device=device)
    lowest = torch.tensor(size / 4.3)
    if kind == "ue8m0":
        exponent = (2 * exponent).floor()
        lowest = lowest.log2().round().exp2()
    place = [torch.arange(n, device=device) for n in shape]
    high = (place[0][:, None, None] + place[1][:, None] + place[2]) % 2
    return lowest.to(device) * (exponent + 2 * high).exp2()


def activations(sizes: FusedMoeSizes, seeds: Seeds, device: str, boundary: str) -> dict[str, torch.Tensor]:
    """x, or in `core` x_q and x_scale. By token modulo 4, a token is dense (0); zero in all but one of eight
    blocks of K (1); small in these (2); dense with four large values (3). Magnitudes of tokens differ by a
    factor of up to 8."""
    generator = generator_of(device, 2, seeds.stationary, seeds.live)
    tokens, blocks = sizes.tokens, sizes.hidden // BLOCK

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    x = torch.empty(tokens, sizes.hidden, dtype=torch.bfloat16, device=device)
    draw_normal(x, generator)
    hot = -(-blocks // HOT)
    is_hot = uniform(tokens, blocks).argsort(-1) < hot
    factor = torch.ones(tokens, blocks, device=device)
    for kind, cold in ((1, 0.0), (2, 2.0**-5)):
        factor[kind::4] = torch.where(is_hot[kind::4], (blocks / hot) ** 0.5, cold)
    factor *= uniform(tokens, 1).mul_(3).sub_(2).exp2_()
    x.view(tokens, blocks, BLOCK).mul_(factor.unsqueeze(-1).bfloat16())
    loud = torch.randint(sizes.hidden, (len(x[3::4]), 4), generator=generator, device=device)
    x[3::4] = x[3::4].scatter(1, loud, x[3::4].gather(1, loud) * 24)
    if seeds.adversarial:
        # With large tokens SiLU saturates and h exceeds what fp16 and FP8 hold. With small ones SiLU is
        # nearly linear and h is below what they hold.
        x[1::3] *= 2.0**7
        x[2::3] *= 2.0**-7
    if boundary != "core":
        return {"x": x}
    x_q, x_scale = quantise_activations(x, fp8_format(sizes.fp8), known_scales(sizes.scales))
    return {"x_q": x_q, "x_scale": x_scale}
