"""Picks of experts for every token, or the logits and the bias from which they follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.fused_moe.sizes import SCALING, FusedMoeSizes
from kernels.operands import Seeds

if TYPE_CHECKING:
    import torch

# Biased scores: LOW to HIGH for experts that are not picked, at least PICKED for those that are. One picked
# expert and one other of its group outweigh any two experts of another group by GAP.
LOW, HIGH, PICKED, GAP = 0.22, 0.26, 0.34, 0.04

MOST = 0.97  # the largest score: a logit of 3.5


def generator_of(device: str, *seeds: int) -> torch.Generator:
    import torch

    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % 2**63
    return torch.Generator(device).manual_seed(mixed)


def picks(sizes: FusedMoeSizes, seeds: Seeds, device: str, boundary: str) -> dict[str, torch.Tensor]:
    """topk_ids and topk_weights, or in `with_routing` the logits and the bias from which these follow with
    clear margins: no biased score and no sum of a group is within GAP of a different choice."""
    import torch

    routing = sizes.routed
    experts = torch.tensor(routing.global_picks(seeds.live, seeds.turn), device=device)
    bias = _bias(sizes, seeds, device)
    scores = _biased(sizes, seeds, experts, bias) - bias
    if boundary == "with_routing":
        return {"logits": torch.log(scores / (1 - scores)), "bias": bias}
    own = scores.gather(1, experts)
    routed = own / own.sum(-1, keepdim=True) * SCALING
    shared = torch.ones(sizes.tokens, sizes.shared, device=device)
    ids = torch.tensor(routing.picks(seeds.live, seeds.turn), dtype=torch.int32, device=device)
    return {"topk_ids": ids, "topk_weights": torch.cat([routed, shared], 1)}


def _bias(sizes: FusedMoeSizes, seeds: Seeds, device: str) -> torch.Tensor:
    """fp32 [experts]: lowers the scores of a quarter of the experts by up to 0.3 and raises the others by up
    to 0.2."""
    import torch

    generator = generator_of(device, 3, seeds.stationary)
    bias = torch.rand(sizes.experts, generator=generator, device=device)
    held_back = torch.randperm(sizes.experts, generator=generator, device=device) % 4 == 0
    return torch.where(held_back, -0.05 - 0.25 * bias, 0.1 + 0.1 * bias)


def _biased(sizes: FusedMoeSizes, seeds: Seeds, experts: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Biased scores, fp32 [tokens, experts]. In every second token one pick has nearly all of the weight.
    Where it is possible, an expert of a group that is not chosen has a higher score than some picks, so that
    only the limit on groups keeps it out."""
    import torch

    device = experts.device
    generator = generator_of(str(device), 4, seeds.stationary, seeds.live, seeds.turn)
    tokens, topk = experts.shape

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    biased = LOW + (HIGH - LOW) * uniform(tokens, sizes.experts)
    most = bias[experts] + MOST
    even = PICKED + (most - PICKED) * uniform(tokens, topk)
    # The heavy pick is one that the rank holds.
    heavy = (uniform(tokens, topk) + (experts < sizes.routed.local)).argmax(-1, keepdim=True)
    uneven = (PICKED + GAP * uniform(tokens, topk)).scatter(1, heavy, most.gather(1, heavy))
    every_other = torch.arange(tokens, device=device)[:, None] % 2 == 0
    biased.scatter_(1, experts, torch.where(every_other, uneven, even))

    groups, limit = sizes.group_limit
    if groups == limit or sizes.experts // groups < 2:
        return biased
    by_group = biased.view(tokens, groups, -1)
    sums = by_group.topk(2, -1).values.sum(-1)
    picked_in = torch.zeros(tokens, groups, dtype=torch.bool, device=device)
    picked_in.scatter_(1, experts // by_group.shape[-1], True)
    least_sum = sums.masked_fill(~picked_in, 9.0).amin(-1)
    least_pick = biased.gather(1, experts).amin(-1)
    decoy = torch.where(picked_in, 9.0, uniform(tokens, groups)).argmin(-1) * by_group.shape[-1]
    score = torch.minimum(least_sum - HIGH - GAP, bias[decoy] + MOST)
    fits = (picked_in.sum(-1) == limit) & (score > least_pick + GAP)
    row = torch.nonzero(fits)[:, 0]
    biased[row, decoy[row]] = score[row]
    return biased
