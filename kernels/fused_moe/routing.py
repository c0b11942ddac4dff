"""The suite's own routing kernel, which stands before a kernel that takes picks in the boundary
`with_routing`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from kernels.lazy import torch

ROWS = 1  # tokens of a program, because decode has few
WARPS = 1  # one warp holds a token's scores: the choice is a chain of reductions, for which warps would wait
INTERPRETED_ROWS = 64  # the interpreter's time depends on the number of programs


class Router(NamedTuple):
    """DeepSeek-V3's choice of experts (technical report, 2.1.2; Gate in inference/model.py)."""

    groups: int  # each of experts / groups consecutive experts
    limit: int  # groups that are chosen by the sum of their two highest biased scores
    topk: int  # experts that are chosen in these groups by their biased scores
    scaling: float  # weights are the unbiased scores of the chosen, normalised, times this
    local: int  # the rank holds experts 0 .. local - 1; others get the id -1 and keep their weight
    shared: int  # 1: the shared expert follows as the last pick, with the id `local` and the weight 1


def router(
    logits: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rule: Router
) -> Callable[[], None]:
    """A call that routes by what logits and bias hold, and writes ids and weights. It is a Triton kernel; on
    a CPU without TRITON_INTERPRET=1 it is torch's operators. Raises ValueError where the shapes do not fit.

    logits:       fp32 [tokens, experts]
    bias:         fp32 [experts]
    ids, weights: int32 and fp32 [tokens, topk + shared] with any strides; routed picks are in any order
    """
    wanted = (logits.shape[0], rule.topk + rule.shared)
    if tuple(ids.shape) != wanted or tuple(weights.shape) != wanted or bias.shape != logits.shape[1:]:
        raise ValueError(
            f"shapes do not fit: logits {list(logits.shape)}, bias {list(bias.shape)}, ids "
            f"{list(ids.shape)}, weights {list(weights.shape)}; picks are {list(wanted)}"
        )
    if logits.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return _triton(logits, bias, ids, weights, rule)
    return _torch(logits, bias, ids, weights, rule)


def _torch(
    logits: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rule: Router
) -> Callable[[], None]:
    import torch

    group = logits.shape[1] // rule.groups
    routed = slice(0, rule.topk)

    def route() -> None:
        scores = logits.sigmoid()
        biased = (scores + bias).unflatten(1, (rule.groups, group))
        if rule.limit < rule.groups:
            best = biased.topk(min(2, group), -1, sorted=False).values.sum(-1)
            kept = best.topk(rule.limit, -1, sorted=False).indices
            dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
            biased.masked_fill_(dropped.unsqueeze(-1), float("-inf"))
        experts = biased.flatten(1).topk(rule.topk, -1, sorted=False).indices
        own = scores.gather(1, experts)
        weights[:, routed] = own.div_(own.sum(-1, keepdim=True)).mul_(rule.scaling)
        ids[:, routed] = experts.masked_fill_(experts >= rule.local, -1)
        if rule.shared:
            ids[:, rule.topk] = rule.local
            weights[:, rule.topk] = 1.0

    return route


def _triton(
    logits: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rule: Router
) -> Callable[[], None]:
    import triton

    from kernels.fused_moe.routing_jit import route_kernel

    tokens, experts = logits.shape
    group = experts // rule.groups
    rows = INTERPRETED_ROWS if logits.device.type == "cpu" else ROWS
    launch = route_kernel[(triton.cdiv(tokens, rows),)]
    arguments = (logits, bias, ids, weights, tokens, *logits.stride(), *ids.stride(), *weights.stride())
    constants = {
        "SCALING": rule.scaling,
        "LOCAL": rule.local,
        "GROUPS": rule.groups,
        "GROUP": group,
        "LIMIT": rule.limit,
        "TOPK": rule.topk,
        "SHARED": rule.shared,
        "GROUPS_PADDED": triton.next_power_of_2(rule.groups),
        "GROUP_PADDED": triton.next_power_of_2(group),
        "PICKS_PADDED": triton.next_power_of_2(rule.topk + rule.shared),
        "BLOCK_M": rows,
        "num_warps": WARPS,
    }

    def route() -> None:
        launch(*arguments, **constants)

    return route
