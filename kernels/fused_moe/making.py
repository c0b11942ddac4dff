"""Operands of the fused MoE on which the usual mistakes show, at any size.

Weights take one pool of normal values, quantised, from which every expert reads at another place: no
two rows are alike, and R1's 1.4 GB take about a second. Only scales are drawn for each block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.formats import BLOCK, fp8_format, quantise_activations
from kernels.operands import Seeds

if TYPE_CHECKING:
    import torch

    from kernels.fused_moe.problem import Sizes

STRIDE = 4099
"""Values between the places where experts begin in the pool: a prime, so that no two rows are aligned."""

GATE = 3.0
"""Root mean square of gate and up for a token of deviation 1: SiLU is neither linear nor saturated."""

HOT = 8
"""One of so many K blocks is hot in every other token."""

# Biased scores: of experts that are not picked, and of picked ones at least. One pick and one other expert
# of its group outweigh any two experts of another group, by GAP.
LOW, HIGH, PICKED, GAP = 0.22, 0.26, 0.34, 0.04
MOST = 0.97  # of any score: a logit of 3.5


def _generator(device: str, *seeds: int) -> torch.Generator:
    import torch

    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % 2**63
    return torch.Generator(device).manual_seed(mixed)


def weights(sizes: Sizes, seeds: Seeds, device: str) -> dict[str, torch.Tensor]:
    """w13, w13_scale, w2 and w2_scale. Codes are those of normal values whose largest in a block of 128x128
    is about four deviations. Neighbouring blocks, along K, along N and of the next expert, have scales that
    differ by a factor of 2 to 8, and no two scales of an expert are alike (powers of two where those are
    asked for)."""
    import torch

    generator = _generator(device, 1, seeds.stationary)
    fmt = fp8_format(sizes.fp8)
    held, hidden, inter = sizes.held, sizes.hidden, sizes.inter
    shapes = {"w13": (2 * inter, hidden), "w2": (hidden, inter)}
    pool = torch.empty(2 * inter * hidden + 2 * held * STRIDE, device=device)
    pool.normal_(0, fmt.max / 4, generator=generator)
    pool = pool.clamp_(-fmt.max, fmt.max).to(fmt.dtype)
    made = {}
    for place, (name, (rows, columns)) in enumerate(shapes.items()):
        values = torch.empty(held, rows, columns, dtype=fmt.dtype, device=device)
        for expert in range(held):
            start = (place * held + expert) * STRIDE
            values[expert].view(-1).copy_(pool[start : start + rows * columns])
        size = (GATE if name == "w13" else 1.0) / (columns**0.5 * fmt.max / 4)
        made[name] = values
        made[f"{name}_scale"] = _scales(held, rows, columns, size, sizes.scales, generator, device)
    return made


def _scales(
    held: int, rows: int, columns: int, size: float, kind: str, generator: torch.Generator, device: str
) -> torch.Tensor:
    """fp32 [held, rows/128, columns/128] of root mean square about `size`: a chessboard of low and high ones,
    1..2 and 4..8 times the lowest."""
    import torch

    shape = (held, rows // BLOCK, columns // BLOCK)
    exponent = torch.rand(shape, generator=generator, device=device)
    lowest = torch.tensor(size / 4.3)
    if kind == "ue8m0":
        exponent = (2 * exponent).floor()
        lowest = lowest.log2().round().exp2()
    place = [torch.arange(n, device=device) for n in shape]
    high = (place[0][:, None, None] + place[1][:, None] + place[2]) % 2
    return lowest.to(device) * (exponent + 2 * high).exp2()


def activations(sizes: Sizes, seeds: Seeds, device: str, boundary: str) -> dict[str, torch.Tensor]:
    """x, or x_q and x_scale. Tokens in turn are dense; zero in all but one of eight K blocks; small there;
    and dense with four large values. Their sizes differ by a factor of up to 8."""
    import torch

    generator = _generator(device, 2, seeds.stationary, seeds.live)
    tokens, blocks = sizes.tokens, sizes.hidden // BLOCK

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    x = torch.empty(tokens, sizes.hidden, dtype=torch.bfloat16, device=device)
    x.normal_(generator=generator)
    hot = -(-blocks // HOT)
    is_hot = uniform(tokens, blocks).argsort(-1) < hot
    factor = torch.ones(tokens, blocks, device=device)
    for kind, cold in ((1, 0.0), (2, 2.0**-5)):
        factor[kind::4] = torch.where(is_hot[kind::4], (blocks / hot) ** 0.5, cold)
    factor *= uniform(tokens, 1).mul_(3).sub_(2).exp2_()
    x.view(tokens, blocks, BLOCK).mul_(factor.unsqueeze(-1).bfloat16())
    loud = torch.randint(sizes.hidden, (len(x[3::4]), 4), generator=generator, device=device)
    x[3::4] = x[3::4].scatter(1, loud, x[3::4].gather(1, loud) * 24)
    if boundary != "core":
        return {"x": x}
    x_q, x_scale = quantise_activations(x, fp8_format(sizes.fp8), sizes.scales)  # type: ignore[arg-type]
    return {"x_q": x_q, "x_scale": x_scale}


def picks(sizes: Sizes, seeds: Seeds, device: str, boundary: str) -> dict[str, torch.Tensor]:
    """topk_ids and topk_weights, or logits and bias from which they follow with clear margins: biased scores
    and sums of groups are nowhere within GAP of another choice."""
    import torch

    from kernels.fused_moe.problem import SCALING

    routing = sizes.routed
    chosen = torch.tensor(routing.global_picks(seeds.live, seeds.turn), device=device)
    bias = _bias(sizes, seeds, device)
    scores = _biased(sizes, seeds, chosen, bias) - bias
    if boundary == "with_routing":
        return {"logits": torch.log(scores / (1 - scores)), "bias": bias}
    own = scores.gather(1, chosen)
    routed = own / own.sum(-1, keepdim=True) * SCALING
    shared = torch.ones(sizes.tokens, sizes.shared, device=device)
    ids = torch.tensor(routing.picks(seeds.live, seeds.turn), dtype=torch.int32, device=device)
    return {"topk_ids": ids, "topk_weights": torch.cat([routed, shared], 1)}


def _bias(sizes: Sizes, seeds: Seeds, device: str) -> torch.Tensor:
    """fp32 [experts]: a quarter of the experts are held back by up to 0.3, the others pushed by up to 0.2."""
    import torch

    generator = _generator(device, 3, seeds.stationary)
    bias = torch.rand(sizes.experts, generator=generator, device=device)
    held_back = torch.randperm(sizes.experts, generator=generator, device=device) % 4 == 0
    return torch.where(held_back, -0.05 - 0.25 * bias, 0.1 + 0.1 * bias)


def _biased(sizes: Sizes, seeds: Seeds, chosen: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Biased scores, fp32 [tokens, experts]. In every other token one pick has nearly all of the weight.
    Where the limit of groups allows it, an expert of another group stands above some picks, and only that
    limit keeps it out."""
    import torch

    device = chosen.device
    generator = _generator(str(device), 4, seeds.stationary, seeds.live, seeds.turn)
    tokens, topk = chosen.shape

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    biased = LOW + (HIGH - LOW) * uniform(tokens, sizes.experts)
    most = bias[chosen] + MOST
    even = PICKED + (most - PICKED) * uniform(tokens, topk)
    # The heavy one is any of those that the rank holds.
    heavy = (uniform(tokens, topk) + (chosen < sizes.routed.local)).argmax(-1, keepdim=True)
    uneven = (PICKED + GAP * uniform(tokens, topk)).scatter(1, heavy, most.gather(1, heavy))
    every_other = torch.arange(tokens, device=device)[:, None] % 2 == 0
    biased.scatter_(1, chosen, torch.where(every_other, uneven, even))

    groups, limit = sizes.group_limit
    if groups == limit or sizes.experts // groups < 2:
        return biased
    by_group = biased.view(tokens, groups, -1)
    sums = by_group.topk(2, -1).values.sum(-1)
    picked_in = torch.zeros(tokens, groups, dtype=torch.bool, device=device)
    picked_in.scatter_(1, chosen // by_group.shape[-1], True)
    least_sum = sums.masked_fill(~picked_in, 9.0).amin(-1)
    least_pick = biased.gather(1, chosen).amin(-1)
    decoy = torch.where(picked_in, 9.0, uniform(tokens, groups)).argmin(-1) * by_group.shape[-1]
    score = torch.minimum(least_sum - HIGH - GAP, bias[decoy] + MOST)
    fits = (picked_in.sum(-1) == limit) & (score > least_pick + GAP)
    row = torch.nonzero(fits)[:, 0]
    biased[row, decoy[row]] = score[row]
    return biased
