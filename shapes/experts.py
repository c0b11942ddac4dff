"""The routed experts of a MoE layer on one rank."""

from __future__ import annotations

from shapes.attention import Parallel
from shapes.case import Size
from shapes.models import ModelConfig
from shapes.routing import Routing


def fused_moe_sizes(
    model: ModelConfig, parallel: Parallel, tokens: int, shared: int = 0, routing: str = "uniform"
) -> dict[str, Size]:
    """The sizes of `fused_moe` on one rank, whose kernel gets `tokens` rows (see `rows`). With expert
    parallelism experts are whole; without it tensor parallelism splits the columns of each expert."""
    inter = model.moe_intermediate_size
    if parallel.ep == 1:
        inter = parallel.split(inter, "expert columns", model)
    return {
        "tokens": tokens,
        "experts": model.n_routed_experts,
        "topk": model.num_experts_per_tok,
        "hidden": model.hidden_size,
        "inter": inter,
        "ep": parallel.ep,
        "shared": shared,
        "routing": routing,
    }


def route(
    model: ModelConfig, parallel: Parallel, tokens: int, shared: int = 0, routing: str = "uniform"
) -> Routing:
    """The routing of `tokens` rows on one rank."""
    experts, topk, groups = model.n_routed_experts, model.num_experts_per_tok, model.n_group
    return Routing(tokens, experts, topk, parallel.ep, shared, routing, groups, model.topk_group)


def rows(model: ModelConfig, parallel: Parallel, tokens: int, routing: str = "uniform") -> int:
    """The rows that a rank's kernel gets if each attention group of its expert-parallel ranks has
    `tokens`."""
    if parallel.ep == 1:
        return tokens
    everywhere = -(-tokens * parallel.ep // parallel.tp)
    return max(round(everywhere * route(model, parallel, 1, routing=routing).reach), 1)
