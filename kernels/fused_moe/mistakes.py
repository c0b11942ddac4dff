"""A fused MoE layer as kernels compute it, one expert after another, and kernels that are wrong in one way
each. Tensors are fp32.

Unless its name says otherwise, a kernel is wrong in one expert. Most mistakes are made in calls that quantise
to FP8: the tolerance of these calls is the widest, so there the error is the hardest to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.formats import (
    BLOCK,
    FORMATS,
    dequantise_activations,
    fp8_format,
    known_scales,
    quantise_activations,
)
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
    """Multiplies 128 of K at a time. sums: rounds the sum of a block; total: rounds the sum so far."""
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
    weight: Round = exact  # rounds the dequantised weights of both products
    both: Round = exact  # rounds gate and up
    h: Round = exact
    given: Round = exact  # of the output of an expert before its weight is applied
    weighted: Round = exact  # of the output of an expert after its weight is applied
    total: Round = exact  # of the sum over experts after each expert
    requant: bool = False  # whether h is quantised, and x as well unless it is given in FP8
    product: Product = whole  # multiplies x and w13
    down: Product = whole  # multiplies h and w2
    act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = silu
    """(gate, up) -> h."""

    # For wrong kernels
    next_expert: tuple[str, ...] = ()
    """Which of w13, w13_scale, w2 and w2_scale are read from the next expert."""
    w13_scale: Round = exact  # of the scales of an expert [blocks of N, blocks of K]
    w2_scale: Round = exact
    w13: Round = exact  # of the dequantised weights
    w2: Round = exact

    def weights(self, o: Operands, expert: int, name: str) -> torch.Tensor:
        """The dequantised weights of an expert. name: w13 or w2"""
        scale = f"{name}_scale"
        codes, scales = (
            getattr(o, each)[(expert + (each in self.next_expert)) % o.sizes.local_experts]
            for each in (name, scale)
        )
        change: Round = getattr(self, name)
        return self.weight(change(fp8_to_fp32(codes, getattr(self, scale)(scales))))


def requantised(o: Operands, x: torch.Tensor) -> torch.Tensor:
    scales = known_scales(o.sizes.scales)
    return dequantise_activations(*quantise_activations(x, fp8_format(o.sizes.fp8), scales))


def layer(
    o: Operands, plan: Plan, picks: Picks | None = None, others: Mapping[int, Plan] = {}
) -> torch.Tensor:
    """Returns the output [tokens, hidden]. others: the plans of experts that compute in another way."""
    ids, weights = picks or routing(o)
    if o.boundary == "core":
        x = plan.x(dequantise_activations(o.x_q, o.x_scale))
    else:
        x = plan.x(requantised(o, o.x.float()) if plan.requant else o.x.float())
    total = x.new_zeros(len(x), o.sizes.hidden)
    for expert in ids[ids >= 0].unique().tolist():
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        own = others.get(expert, plan)
        gate, up = own.both(own.product(x[row], own.weights(o, expert, "w13"))).chunk(2, -1)
        h = own.h(own.act(gate, up))
        if own.requant:
            h = requantised(o, h)
        given = own.given(own.down(h, own.weights(o, expert, "w2")))
        # A wrong choice may give a token the same expert twice, so rows can repeat.
        added = torch.zeros_like(total).index_add_(
            0, row, plan.weighted(given * weights[row, place, None].float())
        )
        total = plan.total(total + added)
    return total


def rounded(bits: int, x: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest, to so many bits of the significand, of which the leading one counts."""
    step = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - bits)
    return torch.where(x == 0, x, (x / step).round() * step)


# Wrong weights of an expert


next_of_n, next_of_k = (partial(torch.roll, shifts=-1, dims=dim) for dim in (0, 1))
"""Of scales [blocks of N, blocks of K]."""


def in_one_block(change: Round) -> Round:
    """Changes only the scale of the block in the middle."""

    def changed(s: torch.Tensor) -> torch.Tensor:
        n, k = (size // 2 for size in s.shape)
        return put(s, (n, k), change(s)[n, k])

    return changed


def times(factor: float, block: int) -> Round:
    """Multiplies a block of K by a factor."""
    some = slice(block * BLOCK, (block + 1) * BLOCK)
    return lambda w: put(w, (..., some), factor * w[:, some])


def without_last_block(w: torch.Tensor) -> torch.Tensor:
    return put(w, (..., slice(-BLOCK, None)), 0.0)


# Wrong values between the two products


def scale_left_out(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return quantise_activations(silu(gate, up), FORMATS["e4m3fn"])[0].float()


def one_poor_scale(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rounds h to FP8 with a scale 64 times as large as the largest value needs."""
    h = silu(gate, up)
    scale = 64 * h.abs().max().clamp(min=1e-30) / 448
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
    "an expert left out": Plan(given=torch.zeros_like),
    "an expert counted twice": Plan(given=lambda y: 2 * y),
    "an expert's rows given to other tokens": Plan(given=of_other_tokens),
    "an expert's last token left out": Plan(given=lambda y: put(y, -1, 0.0)),
    "half of an expert's columns left out": Plan(given=half_left_out),
}

IN_BF16: Mapping[str, Plan] = {
    "w13 in e5m2": Plan(w13=partial(rounded, 3)),
    "w2 in e5m2": Plan(w2=partial(rounded, 3)),
    "GELU for SiLU": Plan(act=gelu),
    "h in fp16": Plan(h=fp16),
    "sums of the first product of 5 bits": Plan(product=partial(by_blocks, total=partial(rounded, 5))),
    "gate and up of 5 bits": Plan(both=partial(rounded, 5)),
}
"""What rounding to FP8 would hide in one expert."""

OF_ALL_EXPERTS_IN_FP8: Mapping[str, Plan] = {
    "w13 in e5m2": Plan(w13=partial(rounded, 3)),
    "GELU for SiLU": Plan(act=gelu),
    "gate clamped at 7": Plan(act=lambda gate, up: silu(gate.clamp(max=7.0), up)),
}


def of_one_expert(wrong: Plan, requant: bool = True) -> Compute:
    """The wrong expert is the one that some token on this rank gives its largest weight."""

    def compute(o: Operands, right: torch.Tensor) -> torch.Tensor:
        ids, weights = (each[:, : o.sizes.topk] for each in routing(o))
        busiest = int(ids.flatten()[torch.where(ids < 0, -1.0, weights).argmax()])
        others = {busiest: replace(wrong, requant=requant)}
        return layer(o, Plan(requant=requant), others=others).to(right.dtype)

    return compute


def of_all_experts(wrong: Plan) -> Compute:
    return lambda o, right: layer(o, replace(wrong, requant=True)).to(right.dtype)


# Wrong choices of experts

WrongPicks = Callable[[Operands, torch.Tensor, torch.Tensor], Picks]
"""(operands, right ids, right weights) -> other ids and weights."""


def rule(
    o: Operands,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    biased: bool = True,
    weigh_biased: bool = False,
    limited: bool = True,
    softmax: bool = False,
    of_group: int = 2,
    more_groups: int = 0,
    normalised: bool = True,
) -> Picks:
    """Picks the routed experts by another rule. The shared expert stays as it is."""
    own = o.logits.double().softmax(-1) if softmax else o.logits.double().sigmoid()
    by = own + o.bias.double() if biased else own
    groups, limit = o.sizes.group_limit
    grouped = by.unflatten(1, (groups, -1))
    if limited:
        sums = grouped.topk(min(of_group, grouped.shape[-1]), -1).values.sum(-1)
        best = sums.topk(max(1, min(groups, limit + more_groups)), -1).indices
        allowed = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best, True)
        grouped = grouped.masked_fill(~allowed[..., None], -9.0)
    again = grouped.flatten(1).topk(o.sizes.topk, -1).indices
    new = (by if weigh_biased else own).gather(1, again)
    if normalised:
        new = new / new.sum(-1, keepdim=True)
    again = torch.where(again < o.sizes.routed.local, again, -1)
    rest = slice(o.sizes.topk, None)
    return torch.cat([again, ids[:, rest]], 1), torch.cat([new * SCALING, weights[:, rest]], 1)


def weights_of_routed(change: Round) -> WrongPicks:
    def wrong(o: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
        top = o.sizes.topk
        return ids, torch.cat([change(weights[:, :top]), weights[:, top:]], 1)

    return wrong


def heaviest_to_the_next(o: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
    """Another expert gets the largest weight of each token."""
    at = torch.where(ids < 0, -1.0, weights).argmax(-1, keepdim=True)
    return ids.scatter(1, at, (ids.gather(1, at) + 1) % o.sizes.local_experts), weights


def shared_weight(value: float) -> WrongPicks:
    return lambda o, ids, weights: (ids, put(weights, (..., slice(o.sizes.topk, None)), value))


PICKS: Mapping[str, WrongPicks] = {
    "routing weights left out": weights_of_routed(torch.ones_like),
    "routing weights scaled twice": weights_of_routed(lambda w: w * SCALING),
    "routing weights not scaled": weights_of_routed(lambda w: w / SCALING),
    "shared expert left out": shared_weight(0.0),
    "first chosen expert left out": lambda o, ids, weights: (ids[:, 1:], weights[:, 1:]),
    "last chosen expert left out": lambda o, ids, weights: (
        ids[:, : o.sizes.topk - 1],
        weights[:, : o.sizes.topk - 1],
    ),
    "bias left out": partial(rule, biased=False),
    "biased scores as weights": partial(rule, weigh_biased=True),
    "groups ignored": partial(rule, limited=False),
    "groups by their best score": partial(rule, of_group=1),
    "one group fewer": partial(rule, more_groups=-1),
    "softmax for sigmoid": partial(rule, softmax=True),
    "routing weights not normalised": partial(rule, normalised=False),
    "weights of 4 bits": weights_of_routed(lambda w: rounded(4, w.float()).double()),
    "heaviest pick to the next expert": heaviest_to_the_next,
    "picks of the token before": lambda o, ids, weights: (ids.roll(1, 0), weights),
    "experts of other ranks taken for expert 0": lambda o, ids, weights: (ids.clamp(min=0), weights),
    "shared expert scaled too": shared_weight(SCALING),
}


def with_picks(wrong: WrongPicks) -> Compute:
    return lambda o, right: layer(o, Plan(), wrong(o, *routing(o))).to(right.dtype)


OUTPUTS: Mapping[str, Compute] = {
    "last row never written": lambda o, out: put(out, -1, math.nan),
    "first tokens swapped": lambda o, out: torch.cat([out[1:2], out[:1], out[2:]]),
    "a tile of columns zero": lambda o, out: put(out, (0, slice(-BLOCK, None)), 0.0),
    "one value off": lambda o, out: put(out, (0, 5), out[0, 6] + out[0].abs().max()),
    "the output 1 percent too large": lambda o, out: 1.01 * out,
    "the output 1 percent too small": lambda o, out: 0.99 * out,
    "the output of 5 bits": lambda o, out: rounded(5, out.float()).to(out.dtype),
}


MISTAKES: tuple[Mistake, ...] = (
    *listed({name: of_one_expert(plan) for name, plan in IN_FP8.items()}, "with_quant", "fp8"),
    *listed({name: of_one_expert(plan, requant=False) for name, plan in IN_BF16.items()}),
    *listed(
        {name: of_all_experts(plan) for name, plan in OF_ALL_EXPERTS_IN_FP8.items()},
        *("with_quant", "fp8", "all experts: {}"),
    ),
    *listed({name: with_picks(wrong) for name, wrong in PICKS.items()}, "with_routing"),
    *listed(OUTPUTS),
)


def answers(o: Operands, rows: list[int], columns: slice) -> Answers:
    given = {name: t[rows] for name, t in o.tensors().items() if name in ("x", "x_q", "x_scale")}
    some, right = o.replaced(**given), routing(o)

    def output(plan: Plan, picks: WrongPicks = lambda o, *right: right) -> torch.Tensor:
        ids, weights = picks(o, *right)
        return layer(some, plan, (ids[rows], weights[rows]))[:, columns]

    plans = {**OF_ALL_EXPERTS_IN_FP8, **IN_FP8, **IN_BF16}
    return {
        **{name: partial(output, Plan(), wrong) for name, wrong in PICKS.items()},
        **{name: partial(output, plan) for name, plan in plans.items() if "an expert" not in name},
    }
