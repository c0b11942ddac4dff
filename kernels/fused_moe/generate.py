"""Operands of the fused MoE on which the usual mistakes show, at any size.

Weights take one pool of normal values, quantised, from which every expert reads at another place: no
two rows are alike, and R1's 1.4 GB take about a second. Only scales are drawn for each block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.formats import BLOCK, fp8_format, known_scales, quantise_activations
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.picks import generator_of, picks
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.operands import Seeds, draw_normal

if TYPE_CHECKING:
    import torch

    from kernels.fused_moe.sizes import FusedMoeSizes

STRIDE = 4099
"""Values between the places where experts begin in the pool: a prime, so that no two rows are aligned."""

GATE = 3.0
"""Root mean square of gate and up for a token of deviation 1: SiLU is neither linear nor saturated."""

HOT = 8
"""One of so many K blocks is hot in every other token."""


def generate(sizes: FusedMoeSizes, seeds: Seeds, device: str, boundary: str = "core") -> FusedMoeOperands:
    """A pure function of its arguments; of the first of the sets that calls rotate over."""
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
    is about four deviations. Neighbouring blocks, along K, along N and of the next expert, have scales that
    differ by a factor of 2 to 8, and no two scales of an expert are alike (powers of two where those are
    asked for)."""
    import torch

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
    """fp32 [local, rows/128, columns/128] of root mean square about `size`: a chessboard of low and high
    ones, 1..2 and 4..8 times the lowest."""
    import torch

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
    """x, or x_q and x_scale. Tokens in turn are dense; zero in all but one of eight K blocks; small there;
    and dense with four large values. Their sizes differ by a factor of up to 8."""
    import torch

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
        # SiLU saturated, and h beyond what fp16 and FP8 hold; and nearly linear, and h below.
        x[1::3] *= 2.0**7
        x[2::3] *= 2.0**-7
    if boundary != "core":
        return {"x": x}
    x_q, x_scale = quantise_activations(x, fp8_format(sizes.fp8), known_scales(sizes.scales))
    return {"x_q": x_q, "x_scale": x_scale}
