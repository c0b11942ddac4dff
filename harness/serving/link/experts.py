"""Time of the routed experts: how many of them tokens hit, and what the shared one adds."""

from __future__ import annotations

import math

from harness.serving.link.times.interpolation import TimeEstimate
from harness.serving.link.times.tables import Tables
from shapes.models import ModelConfig

BALANCED = "balanced"
SLOWEST_OF_8 = 1.42  # deviations by which the largest of 8 normal variables exceeds their mean
BLOCK_ROWS = 64  # rows of a tile of the grouped products


def routed(tables: Tables, config: ModelConfig, tokens: float, tp: int, ep: int) -> TimeEstimate:
    """Time of the routed experts of one rank, of the slowest under expert parallelism.

    Tokens choose their experts alike, each for itself. The tables' `balanced` tokens share no expert as long
    as they can, so that its times at few tokens are times of so many experts' weights, and are read at as
    many as independent tokens hit.
    """
    if BALANCED not in (timed := tables.distributions()) and timed:
        return tables.moe(tokens, tp, ep, timed[0])
    topk = config.num_experts_per_tok
    all_hit = config.n_routed_experts / topk  # tokens that hit every expert if they share none
    share = experts_hit(config, tokens) / config.n_routed_experts
    if ep > 1:
        local = config.n_routed_experts / ep
        share = min(share + SLOWEST_OF_8 * math.sqrt(share * (1 - share) / local), 1.0)
    estimate = tables.moe(share * all_hit, tp, ep, BALANCED)
    if tokens <= all_hit:
        return estimate
    full = tables.moe(all_hit, tp, ep, BALANCED)
    return tables.moe(tokens, tp, ep, BALANCED).times(estimate.us / full.us)


def experts_hit(config: ModelConfig, tokens: float) -> float:
    """Expected number, of tokens that choose alike and each for itself."""
    experts = config.n_routed_experts
    return experts * (1 - (1 - config.num_experts_per_tok / experts) ** tokens)


def shared_expert_factor(config: ModelConfig, tokens: float) -> float:
    """Time of 257 experts, top 9, over that of 256, top 8: by the tiles that the products have. Each expert
    that is hit has at least one, whose weights are read."""
    topk = config.num_experts_per_tok
    hit = experts_hit(config, tokens)
    return 1 + math.ceil(tokens / BLOCK_ROWS) / max(hit, tokens * topk / BLOCK_ROWS)
