"""A fused MoE layer as kernels compute it, expert by expert in fp32; and kernels with one mistake each.

Unless its name says otherwise, a kernel is wrong in one expert. Most mistakes are made in calls that quantise
to FP8: the tolerance of these calls is the widest, so there the error is the hardest to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.formats import BLOCK, dequantise_activations, fp8_format, known_scales, quantise_activations
from kernels.fp8_to_fp32 import fp8_to_fp32
from kernels.fused_moe.operands import SCALING
from kernels.fused_moe.operands import FusedMoeOperands as Operands
from kernels.fused_moe.reference import routing
from kernels.mistakes import E4M3, Answers, Compute, Mistake, Round, exact, fp8, fp16, listed, put

Picks = tuple[torch.Tensor, torch.Tensor]
"""Ids of experts [tokens, picks], -1 for one of another rank, and their weights [tokens, picks]."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [m, K], w [N, K]) -> x @ w^T."""


def whole(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.T


def by_blocks(x: torch.Tensor, w: torch.Tensor, sums: Round = exact, total: Round = exact) -> torch.Tensor:
    """Multiplies 128 of K at a time. sums: rounds each block's sum; total: rounds the sum of blocks so far"""
    out = x.new_zeros(len(x), len(w))
    for a, b in zip(x.split(BLOCK, 1), w.split(BLOCK, 1), strict=True):
        out = total(out + sums(a @ b.T))
    return out


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


@dataclass(frozen=True)
class Plan:
    """How a kernel computes. A Round rounds or changes what it is named for."""

    x: Round = exact
    w13: Round = exact  # the dequantised weights of an expert
    w2: Round = exact
    gate_up: Round = exact
    h: Round = exact
    expert_out: Round = exact  # the output of an expert before it is multiplied by the routing weight
    weighted: Round = exact  # the output of an expert after that
    total: Round = exact  # the sum over experts after each expert
    requant: bool = False  # whether h is quantised, and x as well unless it is given in FP8
    up_product: Product = whole  # multiplies x and w13
    down_product: Product = whole  # multiplies h and w2
    act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = silu
    """(gate, up) -> h."""

    # For wrong kernels
    next_expert: tuple[str, ...] = ()
    """Which of w13, w13_scale, w2 and w2_scale are read from the next expert."""
    w13_scale: Round = exact  # the scales of an expert [blocks of N, blocks of K]
    w2_scale: Round = exact

    def weights(self, operands: Operands, expert: int, name: str) -> torch.Tensor:
        """The dequantised weights of an expert. name: w13 or w2"""

        def read(tensor: str) -> torch.Tensor:
            expert_read = expert + 1 if tensor in self.next_expert else expert
            values: torch.Tensor = getattr(operands, tensor)[expert_read % operands.sizes.local_experts]
            return values

        change: Round = getattr(self, name)
        change_scale: Round = getattr(self, f"{name}_scale")
        return change(fp8_to_fp32(read(name), change_scale(read(f"{name}_scale"))))


def requantised(operands: Operands, x: torch.Tensor) -> torch.Tensor:
    """x quantised as the suite does, and dequantised again."""
    scales = known_scales(operands.sizes.scales)
    return dequantise_activations(*quantise_activations(x, fp8_format(operands.sizes.fp8), scales))


def layer(
    operands: Operands, plan: Plan, picks: Picks | None = None, plans_of_experts: Mapping[int, Plan] = {}
) -> torch.Tensor:
    """The output [tokens, hidden]. picks: None for the right ones; plans_of_experts: by number, the plans of
    experts that compute in another way"""
    ids, weights = routing(operands) if picks is None else picks
    if operands.boundary == "core":
        x = plan.x(dequantise_activations(operands.x_q, operands.x_scale))
    else:
        x = plan.x(requantised(operands, operands.x.float()) if plan.requant else operands.x.float())
    total = x.new_zeros(len(x), operands.sizes.hidden)
    for expert in ids[ids >= 0].unique().tolist():
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        expert_plan = plans_of_experts.get(expert, plan)
        products = expert_plan.up_product(x[row], expert_plan.weights(operands, expert, "w13"))
        gate, up = expert_plan.gate_up(products).chunk(2, -1)
        h = expert_plan.h(expert_plan.act(gate, up))
        if expert_plan.requant:
            h = requantised(operands, h)
        products = expert_plan.down_product(h, expert_plan.weights(operands, expert, "w2"))
        weighted = expert_plan.weighted(expert_plan.expert_out(products) * weights[row, place, None].float())
        # A wrong choice may give a token the same expert twice, so rows can repeat.
        total = plan.total(total + torch.zeros_like(total).index_add_(0, row, weighted))
    return total


def rounded(bits: int, x: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest, to so many bits of the significand, of which the leading one counts."""
    step = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - bits)
    return torch.where(x == 0, x, (x / step).round() * step)


# Wrong weights of an expert. These two replace scales [blocks of N, blocks of K] by those of the next block.
next_of_n = partial(torch.roll, shifts=-1, dims=0)
next_of_k = partial(torch.roll, shifts=-1, dims=1)


def in_one_block(change: Round) -> Round:
    """Changes only the scale of the block in the middle."""

    def changed(scales: torch.Tensor) -> torch.Tensor:
        middle = (scales.shape[0] // 2, scales.shape[1] // 2)
        return put(scales, middle, change(scales)[middle])

    return changed


def times(factor: float, block: int) -> Round:
    """Multiplies a block of K by a factor."""
    columns = slice(block * BLOCK, (block + 1) * BLOCK)
    return lambda w: put(w, (..., columns), factor * w[:, columns])


def without_last_block(w: torch.Tensor) -> torch.Tensor:
    return put(w, (..., slice(-BLOCK, None)), 0.0)


# Wrong values between the two products


def scale_left_out(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The codes of h, without the scale by which h was divided."""
    return quantise_activations(silu(gate, up), fp8_format("e4m3fn"))[0].float()


def one_poor_scale(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rounds h to FP8 with a scale 64 times as large as the largest value needs."""
    h = silu(gate, up)
    scale = 64 * h.abs().max().clamp(min=1e-30) / fp8_format("e4m3fn").max  # clamped, so that it is not 0
    return fp8(E4M3, h / scale) * scale


def gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(gate) * up


# Wrong outputs of an expert, fp32 [its tokens, hidden]


def of_other_tokens(y: torch.Tensor) -> torch.Tensor:
    return y.roll(1, 0) if len(y) > 1 else torch.zeros_like(y)


def half_left_out(y: torch.Tensor) -> torch.Tensor:
    return put(y, (..., slice(y.shape[1] // 2, None)), 0.0)


IN_FP8: Mapping[str, Plan] = {
    "gate and up swapped": Plan(w13=lambda w: w.roll(len(w) // 2, 0)),
    "SiLU left out": Plan(act=lambda gate, up: gate * up),
    "w13's scales left out": Plan(w13_scale=torch.ones_like),
    "w2's scales left out": Plan(w2_scale=torch.ones_like),
    "w13's scale of the next block of N in one block": Plan(w13_scale=in_one_block(next_of_n)),
    "w13's scale of the next block of K in one block": Plan(w13_scale=in_one_block(next_of_k)),
    "w2's scale of the next block of N in one block": Plan(w2_scale=in_one_block(next_of_n)),
    "w2's scale of the next block of K in one block": Plan(w2_scale=in_one_block(next_of_k)),
    "w13's scales of the next block of K": Plan(w13_scale=next_of_k),
    "w2's scales of the next block of N": Plan(w2_scale=next_of_n),
    "w13's scales transposed": Plan(w13_scale=lambda s: s.T.reshape(s.shape)),
    "one scale for all of w2": Plan(w2_scale=lambda s: s.mean().expand_as(s)),
    "scales of the next expert": Plan(next_expert=("w13_scale", "w2_scale")),
    "codes of the next expert": Plan(next_expert=("w13", "w2")),
    "weights of the next expert": Plan(next_expert=("w13", "w2", "w13_scale", "w2_scale")),
    "gate and up interleaved": Plan(w13=lambda w: torch.cat([w[0::2], w[1::2]])),
    "first block of K left out": Plan(w13=times(0.0, 0)),
    "last block of K left out": Plan(w13=without_last_block),
    "first block of h counted twice": Plan(w2=times(2.0, 0)),
    "w13 read a value too far": Plan(w13=lambda w: w.roll(1, 1)),
    "w2 read a row too far": Plan(w2=lambda w: w.roll(1, 0)),
    "last block of h left out": Plan(act=lambda gate, up: without_last_block(silu(gate, up))),
    "sigmoid for SiLU": Plan(act=lambda gate, up: gate.sigmoid() * up),
    "ReLU for SiLU": Plan(act=lambda gate, up: gate.relu() * up),
    "up left out": Plan(act=lambda gate, up: torch.nn.functional.silu(gate)),
    "1 added to up": Plan(act=lambda gate, up: silu(gate, up + 1)),
    "h in FP8 with its scale left out": Plan(act=scale_left_out),
    "h in FP8 without a scale": Plan(act=lambda gate, up: fp8(E4M3, silu(gate, up))),
    "h in FP8 with one poor scale": Plan(act=one_poor_scale),
    "an expert left out": Plan(expert_out=torch.zeros_like),
    "an expert counted twice": Plan(expert_out=lambda y: 2 * y),
    "an expert's rows given to other tokens": Plan(expert_out=of_other_tokens),
    "an expert's last token left out": Plan(expert_out=lambda y: put(y, -1, 0.0)),
    "half of an expert's columns left out": Plan(expert_out=half_left_out),
}

IN_BF16: Mapping[str, Plan] = {
    "w13 in e5m2": Plan(w13=partial(rounded, 3)),
    "w2 in e5m2": Plan(w2=partial(rounded, 3)),
    "GELU for SiLU": Plan(act=gelu),
    "h in fp16": Plan(h=fp16),
    "sums of the first product of 5 bits": Plan(up_product=partial(by_blocks, total=partial(rounded, 5))),
    "gate and up of 5 bits": Plan(gate_up=partial(rounded, 5)),
}
"""Mistakes that in one expert are smaller than the noise of rounding to FP8."""

OF_ALL_EXPERTS_IN_FP8: Mapping[str, Plan] = {
    "w13 in e5m2": Plan(w13=partial(rounded, 3)),
    "GELU for SiLU": Plan(act=gelu),
    "gate clamped at 7": Plan(act=lambda gate, up: silu(gate.clamp(max=7.0), up)),
}


def of_one_expert(wrong: Plan, requant: bool = True) -> Compute:
    """One routed expert is wrong: that of the pick with the largest weight on this rank."""

    def compute(operands: Operands, right: torch.Tensor) -> torch.Tensor:
        all_ids, all_weights = routing(operands)
        ids, weights = all_ids[:, : operands.sizes.topk], all_weights[:, : operands.sizes.topk]
        heaviest = int(ids.flatten()[torch.where(ids < 0, -1.0, weights).argmax()])
        plans_of_experts = {heaviest: replace(wrong, requant=requant)}
        return layer(operands, Plan(requant=requant), plans_of_experts=plans_of_experts).to(right.dtype)

    return compute


def of_all_experts(wrong: Plan) -> Compute:
    return lambda operands, right: layer(operands, replace(wrong, requant=True)).to(right.dtype)


# Wrong choices of experts

WrongPicks = Callable[[Operands, torch.Tensor, torch.Tensor], Picks]
"""(operands, right ids, right weights) -> other ids and weights."""


def by_another_rule(
    operands: Operands, ids: torch.Tensor, weights: torch.Tensor, *,
    softmax: bool = False, biased: bool = True, weigh_biased: bool = False, normalised: bool = True,
    limited: bool = True, scores_of_group: int = 2, more_groups: int = 0,
) -> Picks:  # fmt: skip
    """Picks the routed experts by a rule that differs from DeepSeek-V3's. The shared expert stays as it is.

    softmax:         whether scores are a softmax of the logits, not sigmoids
    biased, weigh_biased: whether biased scores choose experts, and whether they become weights
    normalised:      whether the weights of a token's picks are divided by their sum
    limited:         whether the picks of a token lie in the best groups
    scores_of_group: the number of a group's best scores whose sum says how good it is
    more_groups:     the number of groups beyond the right one
    """
    scores = operands.logits.double().softmax(-1) if softmax else operands.logits.double().sigmoid()
    ranking = scores + operands.bias.double() if biased else scores
    groups, limit = operands.sizes.group_limit
    by_group = ranking.unflatten(1, (groups, -1))
    if limited:
        sums = by_group.topk(min(scores_of_group, by_group.shape[-1]), -1).values.sum(-1)
        best = sums.topk(max(1, min(groups, limit + more_groups)), -1).indices
        is_allowed = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best, True)
        by_group = by_group.masked_fill(~is_allowed[..., None], float("-inf"))
    chosen = by_group.flatten(1).topk(operands.sizes.topk, -1).indices
    chosen_weights = (ranking if weigh_biased else scores).gather(1, chosen)
    if normalised:
        chosen_weights = chosen_weights / chosen_weights.sum(-1, keepdim=True)
    chosen = torch.where(chosen < operands.sizes.routed.local, chosen, -1)
    shared_ids, shared_weights = ids[:, operands.sizes.topk :], weights[:, operands.sizes.topk :]
    return torch.cat([chosen, shared_ids], 1), torch.cat([chosen_weights * SCALING, shared_weights], 1)


def weights_of_routed(change: Round) -> WrongPicks:
    def wrong(operands: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
        top = operands.sizes.topk
        return ids, torch.cat([change(weights[:, :top]), weights[:, top:]], 1)

    return wrong


def heaviest_to_the_next(operands: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
    """In each token's pick with the largest weight, the next expert takes the place of the right one."""
    heaviest = torch.where(ids < 0, -1.0, weights).argmax(-1, keepdim=True)
    next_expert = (ids.gather(1, heaviest) + 1) % operands.sizes.local_experts
    return ids.scatter(1, heaviest, next_expert), weights


def only_before_the_last(operands: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
    """The picks before the last routed one. The shared expert, which comes after it, is left out too."""
    count = operands.sizes.topk - 1
    return ids[:, :count], weights[:, :count]


def shared_weight(value: float) -> WrongPicks:
    return lambda operands, ids, weights: (ids, put(weights, (..., slice(operands.sizes.topk, None)), value))


PICKS: Mapping[str, WrongPicks] = {
    "routing weights left out": weights_of_routed(torch.ones_like),
    "routing weights scaled twice": weights_of_routed(lambda w: w * SCALING),
    "routing weights not scaled": weights_of_routed(lambda w: w / SCALING),
    "shared expert left out": shared_weight(0.0),
    "first chosen expert left out": lambda operands, ids, weights: (ids[:, 1:], weights[:, 1:]),
    "last chosen expert left out": only_before_the_last,
    "bias left out": partial(by_another_rule, biased=False),
    "biased scores as weights": partial(by_another_rule, weigh_biased=True),
    "groups ignored": partial(by_another_rule, limited=False),
    "groups by their best score": partial(by_another_rule, scores_of_group=1),
    "one group fewer": partial(by_another_rule, more_groups=-1),
    "softmax for sigmoid": partial(by_another_rule, softmax=True),
    "routing weights not normalised": partial(by_another_rule, normalised=False),
    "weights of 4 bits": weights_of_routed(lambda w: rounded(4, w.float()).double()),
    "heaviest pick to the next expert": heaviest_to_the_next,
    "picks of the token before": lambda operands, ids, weights: (ids.roll(1, 0), weights),
    "experts of other ranks taken for expert 0": lambda operands, ids, weights: (ids.clamp(min=0), weights),
    "shared expert scaled too": shared_weight(SCALING),
}


def of_picks(wrong: WrongPicks) -> Compute:
    def compute(operands: Operands, right: torch.Tensor) -> torch.Tensor:
        return layer(operands, Plan(), wrong(operands, *routing(operands))).to(right.dtype)

    return compute


OUTPUTS: Mapping[str, Compute] = {
    "last row never written": lambda operands, out: put(out, -1, math.nan),
    "first tokens swapped": lambda operands, out: torch.cat([out[1:2], out[:1], out[2:]]),
    "a tile of columns zero": lambda operands, out: put(out, (0, slice(-BLOCK, None)), 0.0),
    "one value off": lambda operands, out: put(out, (0, 5), out[0, 6] + out[0].abs().max()),
    "the output 1 percent too large": lambda operands, out: 1.01 * out,
    "the output 1 percent too small": lambda operands, out: 0.99 * out,
    "the output of 5 bits": lambda operands, out: rounded(5, out.float()).to(out.dtype),
}


MISTAKES: tuple[Mistake, ...] = (
    *listed({name: of_one_expert(plan) for name, plan in IN_FP8.items()}, "with_quant", "fp8"),
    *listed({name: of_one_expert(plan, requant=False) for name, plan in IN_BF16.items()}),
    *listed(
        {name: of_all_experts(plan) for name, plan in OF_ALL_EXPERTS_IN_FP8.items()},
        boundary="with_quant",
        activations="fp8",
        form="all experts: {}",
    ),
    *listed({name: of_picks(wrong) for name, wrong in PICKS.items()}, "with_routing"),
    *listed(OUTPUTS),
)


def answers(operands: Operands, rows: list[int], columns: slice) -> Answers:
    """What the wrong kernels give for these rows and columns (see `Answers`)."""
    activations = {name: t[rows] for name, t in operands.tensors().items() if name in ("x", "x_q", "x_scale")}
    operands_of_rows = operands.replaced(**activations)
    right_ids, right_weights = routing(operands)

    def with_plan(plan: Plan) -> torch.Tensor:
        return layer(operands_of_rows, plan, (right_ids[rows], right_weights[rows]))[:, columns]

    def with_picks(wrong: WrongPicks) -> torch.Tensor:
        # A wrong choice may read the picks of other rows, so that it is made for all of them.
        ids, weights = wrong(operands, right_ids, right_weights)
        return layer(operands_of_rows, Plan(), (ids[rows], weights[rows]))[:, columns]

    # Here all experts make the mistake. Plans that change the whole output of an expert are left out, because
    # made by all experts that is another mistake.
    plans = {**OF_ALL_EXPERTS_IN_FP8, **IN_FP8, **IN_BF16}
    return {
        **{name: partial(with_picks, wrong) for name, wrong in PICKS.items()},
        **{name: partial(with_plan, plan) for name, plan in plans.items() if plan.expert_out is exact},
    }
