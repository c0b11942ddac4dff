"""The routed experts of a MoE layer on one rank."""

from __future__ import annotations

import math

from shapes.attention import Parallel
from shapes.case import Size
from shapes.models import ModelConfig
from shapes.routing import Routing

PADDED = 128  # the columns of an expert on a rank are padded to a multiple of this


def expert_columns(model: ModelConfig, parallel: Parallel) -> int:
    """The columns of each expert on a rank, without padding. With expert parallelism experts are whole;
    without it all ranks, those of DP attention too, share the columns of each expert (vLLM 0.33:
    flatten_tp_across_dp_and_pcp in fused_moe/config.py; SGLang 0.5.23: moe_tp_size in moe_ep_setup.py).
    Raises ValueError if the ranks do not divide them."""
    if parallel.ep > 1:
        return model.moe_intermediate_size
    all_ranks = Parallel(tp=parallel.tp * parallel.dp)
    return all_ranks.split(model.moe_intermediate_size, "expert columns", model)


def place_of_experts(model: ModelConfig, parallel: Parallel) -> str:
    """`experts`, with the columns of each where they are padded."""
    width = expert_columns(model, parallel)
    return f"experts, {width} columns padded" if width % PADDED else "experts"


def fused_moe_sizes(
    model: ModelConfig, parallel: Parallel, tokens: int, shared: int = 0, routing: str = "uniform"
) -> dict[str, Size]:
    """The sizes of `fused_moe` on a rank whose kernel gets `tokens` rows. Columns of experts are padded as by
    AITER and vLLM's FP8 kernels, Triton's aside (kernels.fused_moe.operands). shared, routing: see Routing"""
    inter = math.ceil(expert_columns(model, parallel) / PADDED) * PADDED
    sizes: dict[str, Size] = {
        "tokens": tokens, "experts": model.n_routed_experts, "topk": model.num_experts_per_tok,
        "hidden": model.hidden_size, "inter": inter, "ep": parallel.ep, "shared": shared, "routing": routing,
    }  # fmt: skip
    if (model.n_group, model.topk_group) != (Routing.groups, Routing.group_topk):
        sizes |= {"groups": model.n_group, "group_topk": model.topk_group}
    return sizes


def routing_of(
    model: ModelConfig, parallel: Parallel, tokens: int, shared: int = 0, pattern: str = "uniform"
) -> Routing:
    experts, topk, groups = model.n_routed_experts, model.num_experts_per_tok, model.n_group
    return Routing(tokens, experts, topk, parallel.ep, shared, pattern, groups, model.topk_group)


def rows_on_rank(model: ModelConfig, parallel: Parallel, tokens: int, routing: str = "uniform") -> int:
    """How many tokens chose an expert of the rank, at least one, if each DP group has `tokens` tokens: the
    rows of the rank's kernel where it gets no others. Without expert parallelism these are all tokens."""
    if parallel.ep == 1:
        return tokens * parallel.dp
    of_all_ranks = math.ceil(tokens * parallel.ep / parallel.tp)  # ep ranks form ep / tp groups
    reach = routing_of(model, parallel, 1, pattern=routing).reach
    return max(round(of_all_ranks * reach), 1)
