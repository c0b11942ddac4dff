"""The routed experts of a MoE layer on one rank."""

from __future__ import annotations

from shapes.attention import Parallel
from shapes.case import Size
from shapes.models import ModelConfig
from shapes.routing import Routing

PADDED = 128


def expert_columns(model: ModelConfig, parallel: Parallel) -> int:
    if parallel.ep > 1:
        return model.moe_intermediate_size
    everyone = Parallel(tp=parallel.tp * parallel.dp)
    return everyone.split(model.moe_intermediate_size, "expert columns", model)


def place_of_experts(model: ModelConfig, parallel: Parallel) -> str:
    """`experts`, with the columns of each where they are padded."""
    width = expert_columns(model, parallel)
    return f"experts, {width} columns padded" if width % PADDED else "experts"


def fused_moe_sizes(
    model: ModelConfig, parallel: Parallel, tokens: int, shared: int = 0, routing: str = "uniform"
) -> dict[str, Size]:
    """The sizes of `fused_moe` on one rank, whose kernel gets `tokens` rows (see `rows`). With expert
    parallelism experts are whole; without it all ranks, those of DP attention too, share the columns of each
    expert (vLLM 0.33: flatten_tp_across_dp_and_pcp in fused_moe/config.py; SGLang 0.5.23: moe_tp_size in
    moe_ep_setup.py). Columns that are no multiple of 128 are padded to one, as AITER has it in both engines
    and vLLM's FP8 kernels but for Triton's (see kernels.fused_moe.operands)."""
    inter = -(-expert_columns(model, parallel) // PADDED) * PADDED
    sizes: dict[str, Size] = {
        "tokens": tokens,
        "experts": model.n_routed_experts,
        "topk": model.num_experts_per_tok,
        "hidden": model.hidden_size,
        "inter": inter,
        "ep": parallel.ep,
        "shared": shared,
        "routing": routing,
    }
    groups: dict[str, Size] = {"groups": model.n_group, "group_topk": model.topk_group}
    usual = {"groups": Routing.groups, "group_topk": Routing.group_topk}
    return sizes if groups == usual else sizes | groups


def route(
    model: ModelConfig, parallel: Parallel, tokens: int, shared: int = 0, routing: str = "uniform"
) -> Routing:
    """The routing of `tokens` rows on one rank."""
    experts, topk, groups = model.n_routed_experts, model.num_experts_per_tok, model.n_group
    return Routing(tokens, experts, topk, parallel.ep, shared, routing, groups, model.topk_group)


def rows(model: ModelConfig, parallel: Parallel, tokens: int, routing: str = "uniform") -> int:
    """The rows that a rank's kernel gets if each attention group of its expert-parallel ranks has `tokens`;
    without expert parallelism those of all groups."""
    if parallel.ep == 1:
        return tokens * parallel.dp
    everywhere = -(-tokens * parallel.ep // parallel.tp)
    return max(round(everywhere * route(model, parallel, 1, routing=routing).reach), 1)
