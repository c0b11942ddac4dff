"""The suite's own routing kernel. In the boundary `with_routing` it runs before a kernel that takes picks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

from kernels.fused_moe.operands import SCALING, FusedMoeSizes
from kernels.lazy import torch

ROWS = 1  # tokens of a program, because decode has few
WARPS = 1  # warps of a program, because the choice is a chain of reductions, for which warps would wait
INTERPRETED_ROWS = 64  # the interpreter's time depends on the number of programs


class Router(NamedTuple):
    """DeepSeek-V3's choice of experts (technical report, 2.1.2; Gate in inference/model.py)."""

    groups: int  # groups of consecutive experts, of experts / groups each
    limit: int  # groups that are chosen by the sum of their two highest biased scores
    topk: int  # experts that are chosen in these groups by their biased scores
    scaling: float  # weights are the unbiased scores of the chosen, normalised, times this
    local: int  # the rank holds experts 0 .. local - 1; others get the id -1 and keep their weight
    shared: int  # 1: the shared expert follows as the last pick, with the id `local` and the weight 1; else 0

    @classmethod
    def of(cls, sizes: FusedMoeSizes) -> Router:
        return cls(*sizes.group_limit, sizes.topk, SCALING, sizes.routed.local, sizes.shared)


def router(
    logits: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rule: Router
) -> Callable[[], None]:
    """A call that routes by what logits and bias hold, and writes ids and weights. It is a Triton kernel; on
    a CPU without TRITON_INTERPRET=1 it is torch's operators.

    logits:       fp32 [tokens, experts]
    bias:         fp32 [experts]
    ids, weights: int32 and fp32 [tokens, topk + shared] with any strides; routed picks are in any order
    """
    if logits.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":

        def route() -> None:
            chosen_ids, chosen_weights = choose(logits, bias, rule)
            ids.copy_(chosen_ids)
            weights.copy_(chosen_weights)

        return route

    import triton

    from kernels.fused_moe.routing_jit import route_kernel

    tokens, experts = logits.shape
    experts_of_group = experts // rule.groups
    rows = INTERPRETED_ROWS if logits.device.type == "cpu" else ROWS
    return functools.partial(
        route_kernel[(triton.cdiv(tokens, rows),)],
        logits, bias, ids, weights, tokens, *logits.stride(), *ids.stride(), *weights.stride(),
        SCALING=rule.scaling, LOCAL=rule.local, GROUPS=rule.groups, GROUP=experts_of_group,
        LIMIT=rule.limit, TOPK=rule.topk, SHARED=rule.shared,
        GROUPS_PADDED=triton.next_power_of_2(rule.groups),
        GROUP_PADDED=triton.next_power_of_2(experts_of_group),
        PICKS_PADDED=triton.next_power_of_2(rule.topk + rule.shared),
        BLOCK_M=rows, num_warps=WARPS,
    )  # fmt: skip


def choose(logits: torch.Tensor, bias: torch.Tensor, rule: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """The picks int64 [tokens, topk + shared], and their weights in the dtype of the arguments. logits:
    [tokens, experts]; bias: [experts]"""
    import torch

    scores = logits.sigmoid()
    biased = (scores + bias).unflatten(-1, (rule.groups, -1))
    sums = biased.topk(min(2, biased.shape[-1]), -1).values.sum(-1)
    best_groups = sums.topk(rule.limit, -1).indices
    is_left_out = torch.ones_like(sums, dtype=torch.bool).scatter_(1, best_groups, False)
    biased.masked_fill_(is_left_out.unsqueeze(-1), float("-inf"))
    ids = biased.flatten(1).topk(rule.topk, -1, sorted=False).indices
    weights = scores.gather(1, ids)
    weights.div_(weights.sum(-1, keepdim=True)).mul_(rule.scaling)
    ids.masked_fill_(ids >= rule.local, -1)
    if rule.shared:
        ids = torch.cat([ids, torch.full_like(ids[:, :1], rule.local)], 1)
        weights = torch.cat([weights, torch.ones_like(weights[:, :1])], 1)
    return ids, weights
