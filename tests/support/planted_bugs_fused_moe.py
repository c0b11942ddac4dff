"""Fused MoE in plain torch: right in several ways (RIGHT), wrong in many (BUGS).

`compute` follows the layer step by step; a `Plan` says how each step rounds, and a bug replaces a step, in
one place only: one expert, one block of one expert, one token. How far over its limit the judge finds each
is printed by `pytest -s tests/kernels/fused_moe/test_check.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from kernels.formats import (
    dequantise_activations,
    fp8_format,
    quantise_activations,
)
from kernels.fp8_to_fp32 import fp8_to_fp32
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.reference import routing
from kernels.fused_moe.sizes import SCALING

Step = Callable[..., torch.Tensor]


def exact(t: torch.Tensor) -> torch.Tensor:
    return t


def bf16(t: torch.Tensor) -> torch.Tensor:
    return t.bfloat16().float()


@dataclass(frozen=True)
class Plan:
    """How x, weights, gate and up, h, and what an expert gives before and after its weight are rounded.

    scales:  (expert, w13_scale, w2_scale) -> the two that it takes
    body:    (x, w13, w2, plan) -> what an expert gives, in place of the right one
    """

    x: Step = exact
    weight: Step = exact
    both: Step = exact
    h: Step = exact
    given: Step = exact
    weighted: Step = exact
    scales: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = field(
        default=lambda e, s13, s2: (s13, s2)
    )
    body: Callable[..., torch.Tensor] | None = None


def activations(o: FusedMoeOperands, fp8: bool) -> torch.Tensor:
    if o.boundary == "core":
        return dequantise_activations(o.x_q, o.x_scale)
    return requantised(o)(o.x.float()) if fp8 else o.x.float()


def requantised(o: FusedMoeOperands) -> Step:
    def step(h: torch.Tensor) -> torch.Tensor:
        return dequantise_activations(*quantise_activations(h, fp8_format(o.sizes.fp8), o.sizes.scales))

    return step


def body(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, plan: Plan) -> torch.Tensor:
    gate, up = plan.both(x @ w13.T).chunk(2, -1)
    h = plan.h(torch.nn.functional.silu(gate) * up)
    return plan.given(h @ w2.T)


def compute(
    o: FusedMoeOperands,
    plan: Plan = Plan(),
    fp8: bool = False,
    picks: tuple[torch.Tensor, torch.Tensor] | None = None,
    only: set[int] | None = None,
    token: int | None = None,
) -> torch.Tensor:
    """fp32 [tokens, hidden]. fp8: x and h are requantised. picks: ids and weights, by default the right ones.
    only: experts that are computed, for differences. token: the only row that is computed, [1, hidden]."""
    ids, weights = picks or routing(o)
    rows = slice(None) if token is None else slice(token, token + 1)
    ids, weights = ids[rows], weights[rows]
    if fp8:
        plan = replace(plan, h=(lambda h, step=plan.h: requantised(o)(step(h))))
    x = plan.x(activations(o, fp8)[rows])
    total = torch.zeros(len(x), o.sizes.hidden, dtype=torch.float64)
    for expert in ids.unique().tolist():
        if expert < 0 or (only is not None and expert not in only):
            continue
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        s13, s2 = plan.scales(expert, o.w13_scale[expert], o.w2_scale[expert])
        w13 = plan.weight(fp8_to_fp32(o.w13[expert], s13))
        w2 = plan.weight(fp8_to_fp32(o.w2[expert], s2))
        given = (plan.body or body)(x[row], w13, w2, plan)
        total.index_add_(0, row, plan.weighted(given * weights[row, place, None].float()).double())
    return total.float()


BF16 = Plan(bf16, bf16, bf16, bf16, bf16, bf16)
RIGHT: dict[str, tuple[Plan, bool]] = {
    "fp32": (Plan(), False),
    "bf16 everywhere": (BF16, False),
    "bf16 products": (Plan(x=bf16, weight=bf16, h=bf16), False),
    "fp8": (Plan(), True),
    "fp8, bf16 elsewhere": (Plan(both=bf16, h=bf16, given=bf16, weighted=bf16), True),
    "fp8, then dequantised to bf16": (BF16, True),
}


# Bugs of an expert: (operands, expert) -> its plan


def scale_moved(name: str, dim: int) -> Callable[[FusedMoeOperands, int], Plan]:
    """One block takes the scale of the next one along `dim`."""

    def bug(o: FusedMoeOperands, expert: int) -> Plan:
        def scales(e: int, s13: torch.Tensor, s2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            both = {"w13": s13, "w2": s2}
            moved = both[name].clone()
            n, k = (size // 2 for size in moved.shape)
            other = [n, k]
            other[dim] = (other[dim] + 1) % moved.shape[dim]
            moved[n, k] = both[name][tuple(other)]
            both[name] = moved
            return both["w13"], both["w2"]

        return Plan(scales=scales)

    return bug


def scales_transposed(o, expert):
    def turn(s: torch.Tensor) -> torch.Tensor:
        return s.T.reshape(s.shape)

    return Plan(scales=lambda e, s13, s2: (turn(s13), s2))


def w2_scales_transposed(o, expert):
    return Plan(scales=lambda e, s13, s2: (s13, s2.T.reshape(s2.shape)))


def scales_of_next_expert(o, expert):
    other = (expert + 1) % o.sizes.local_experts
    return Plan(scales=lambda e, s13, s2: (o.w13_scale[other], o.w2_scale[other]))


def last_k_block_ignored(o, expert):
    def wrong(x, w13, w2, plan):
        return body(x[:, :-128], w13[:, :-128], w2, plan)

    return Plan(body=wrong)


def last_block_of_h_ignored(o, expert):
    def wrong(x, w13, w2, plan):
        gate, up = (x @ w13.T).chunk(2, -1)
        h = torch.nn.functional.silu(gate) * up
        h[:, -128:] = 0
        return h @ w2.T

    return Plan(body=wrong)


def gate_and_up_swapped(o, expert):
    def wrong(x, w13, w2, plan):
        up, gate = (x @ w13.T).chunk(2, -1)
        return plan.h(torch.nn.functional.silu(gate) * up) @ w2.T

    return Plan(body=wrong)


def silu_forgotten(o, expert):
    def wrong(x, w13, w2, plan):
        gate, up = (x @ w13.T).chunk(2, -1)
        return plan.h(gate * up) @ w2.T

    return Plan(body=wrong)


def requantisation_scale_missing(o, expert):
    fmt = fp8_format(o.sizes.fp8)

    def wrong(x, w13, w2, plan):
        gate, up = (x @ w13.T).chunk(2, -1)
        h, _ = quantise_activations(torch.nn.functional.silu(gate) * up, fmt)
        return h.float() @ w2.T

    return Plan(body=wrong)


def accumulated_in_fp16(o, expert):
    """Codes of FP8 summed in fp16, as a matrix instruction with an fp16 accumulator does."""
    codes, scale = o.w13[expert].float(), o.w13_scale[expert]
    fmt = fp8_format(o.sizes.fp8)

    def wrong(x, w13, w2, plan):
        q, row_scale = quantise_activations(x, fmt, o.sizes.scales)
        both = torch.zeros(len(x), len(codes))
        for k in range(scale.shape[1]):
            block = slice(128 * k, 128 * (k + 1))
            part = (q[:, block].float() @ codes[:, block].T).half().float()
            both += part * row_scale[:, k, None] * scale[:, k].repeat_interleave(128)
        gate, up = both.chunk(2, -1)
        return plan.h(torch.nn.functional.silu(gate) * up) @ w2.T

    return Plan(body=wrong)


EXPERT_BUGS: dict[str, Callable[[FusedMoeOperands, int], Plan]] = {
    "w13 scale of the next K block": scale_moved("w13", 1),
    "w13 scale of the next N block": scale_moved("w13", 0),
    "w2 scale of the next K block": scale_moved("w2", 1),
    "w2 scale of the next N block": scale_moved("w2", 0),
    **{
        bug.__name__: bug
        for bug in (
            scales_transposed,
            w2_scales_transposed,
            scales_of_next_expert,
            last_k_block_ignored,
            last_block_of_h_ignored,
            gate_and_up_swapped,
            silu_forgotten,
            requantisation_scale_missing,
            accumulated_in_fp16,
        )
    },
}


# Bugs of picks: (operands, ids, weights) -> those of all tokens; the test takes one token's


def scores(o: FusedMoeOperands) -> tuple[torch.Tensor, torch.Tensor]:
    own = o.logits.double().sigmoid()
    return own, own + o.bias.double()


def chosen_again(o, ids, by: torch.Tensor, weigh: torch.Tensor | None = None, limited: bool = True):
    """The routed picks and weights by other scores."""
    own, _ = scores(o)
    groups, limit = o.sizes.group_limit
    grouped = by.unflatten(1, (groups, -1))
    if limited:
        kept = grouped.topk(2, -1).values.sum(-1).topk(limit, -1).indices
        grouped = grouped.masked_fill(
            ~torch.zeros(len(by), groups).bool().scatter(1, kept, True)[..., None], -9.0
        )
    again = grouped.flatten(1).topk(o.sizes.topk, -1).indices
    weights = (own if weigh is None else weigh).gather(1, again)
    weights = weights / weights.sum(-1, keepdim=True) * SCALING
    again = torch.where(again < o.sizes.routed.local, again, -1)
    rest = ids[:, o.sizes.topk :]
    return torch.cat([again, rest], 1), torch.cat([weights, torch.ones_like(rest).double()], 1)


def bias_ignored(o, ids, weights):
    return chosen_again(o, ids, scores(o)[0])


def biased_scores_as_weights(o, ids, weights):
    _, biased = scores(o)
    return chosen_again(o, ids, biased, biased)


def groups_ignored(o, ids, weights):
    return chosen_again(o, ids, scores(o)[1], limited=False)


def not_normalised(o, ids, weights):
    own, biased = scores(o)
    again, normal = chosen_again(o, ids, biased)
    total = biased.topk(o.sizes.topk).indices
    normal[:, : o.sizes.topk] *= own.gather(1, total).sum(-1, keepdim=True)
    return again, normal


def scaling_missing(o, ids, weights):
    weights = weights.clone()
    weights[:, : o.sizes.topk] /= SCALING
    return ids, weights


def last_pick_dropped(o, ids, weights):
    return ids[:, :-1], weights[:, :-1]


def weight_twice(o, ids, weights):
    return ids, weights**2


def elsewhere_taken_for(expert: Callable[[FusedMoeOperands], int]):
    def bug(o, ids, weights):
        return torch.where(ids < 0, expert(o), ids), weights

    return bug


def given_to_another_expert(o, ids, weights):
    ids = ids.clone()
    heavy = torch.where(ids < 0, -1, weights).argmax(-1, keepdim=True)
    return ids.scatter(1, heavy, (ids.gather(1, heavy) + 1) % o.sizes.local_experts), weights


def heaviest_pick_lost(o, ids, weights):
    heavy = torch.where(ids < 0, -1, weights).argmax(-1, keepdim=True)
    return ids.scatter(1, heavy, -1), weights


PICK_BUGS = {
    **{
        bug.__name__: bug
        for bug in (
            bias_ignored,
            biased_scores_as_weights,
            groups_ignored,
            not_normalised,
            scaling_missing,
            last_pick_dropped,
            weight_twice,
            given_to_another_expert,
            heaviest_pick_lost,
        )
    },
    "elsewhere is expert 0": elsewhere_taken_for(lambda o: 0),
    "elsewhere is the last": elsewhere_taken_for(lambda o: o.sizes.local_experts - 1),
}
