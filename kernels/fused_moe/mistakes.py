"""Wrong arithmetic of the fused MoE: of one expert, of all, of the choice of experts, of the output.

Most are of one expert in calls that quantise to FP8, where they err by the fewest limits; their plans take
operands of all boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.arithmetic.fused_moe import Picks, Plan, Weights, by_blocks, dequantised, layer, silu
from kernels.arithmetic.roundings import Round, exact, fp8, fp16
from kernels.formats import BLOCK, FORMATS, quantise_activations
from kernels.fp8_to_fp32 import fp8_to_fp32
from kernels.fused_moe.operands import FusedMoeOperands as Operands
from kernels.fused_moe.reference import routing
from kernels.fused_moe.sizes import SCALING
from kernels.fused_moe.sizes import FusedMoeSizes as Sizes
from kernels.mistakes import Compute, Mistake

WeightsOf = Callable[[Operands, int], Weights]


def rounded(bits: int, x: torch.Tensor) -> torch.Tensor:
    """So many bits of the significand, the first included, to nearest."""
    step = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - bits)
    return torch.where(x == 0, x, (x / step).round() * step)


def put(x: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    x = x.clone()
    x[at] = value
    return x


# Wrong scales: of an expert, [blocks of N, blocks of K]


def scales(w13: Round = exact, w2: Round = exact) -> WeightsOf:
    def weights(o: Operands, expert: int) -> Weights:
        s13, s2 = w13(o.w13_scale[expert]), w2(o.w2_scale[expert])
        return fp8_to_fp32(o.w13[expert], s13), fp8_to_fp32(o.w2[expert], s2)

    return weights


def next_of_n(s: torch.Tensor) -> torch.Tensor:
    return s.roll(-1, 0)


def next_of_k(s: torch.Tensor) -> torch.Tensor:
    return s.roll(-1, 1)


def in_one_block(change: Round) -> Round:
    """In the middle."""

    def changed(s: torch.Tensor) -> torch.Tensor:
        n, k = (size // 2 for size in s.shape)
        return put(s, (n, k), change(s)[n, k])

    return changed


def transposed(s: torch.Tensor) -> torch.Tensor:
    return s.T.reshape(s.shape)


def mean(s: torch.Tensor) -> torch.Tensor:
    return s.mean().expand_as(s)


def of_next_expert(*names: str) -> WeightsOf:
    """names: what is read of the next expert: w13, w13_scale, w2, w2_scale"""

    def weights(o: Operands, expert: int) -> Weights:
        def of(name: str) -> torch.Tensor:
            return getattr(o, name)[(expert + int(name in names)) % o.sizes.local_experts]

        return fp8_to_fp32(of("w13"), of("w13_scale")), fp8_to_fp32(of("w2"), of("w2_scale"))

    return weights


# Wrong weights, dequantised


def changed(w13: Round = exact, w2: Round = exact) -> WeightsOf:
    def weights(o: Operands, expert: int) -> Weights:
        right13, right2 = dequantised(o, expert)
        return w13(right13), w2(right2)

    return weights


def times(factor: float, block: int) -> Round:
    """Of a block of K."""

    def multiplied(w: torch.Tensor) -> torch.Tensor:
        some = slice(block * BLOCK, (block + 1) * BLOCK)
        return put(w, (..., some), factor * w[:, some])

    return multiplied


def last_of_k_lost(w: torch.Tensor) -> torch.Tensor:
    return put(w, (..., slice(-BLOCK, None)), 0.0)


def gate_after_up(w: torch.Tensor) -> torch.Tensor:
    return w.roll(len(w) // 2, 0)


def gate_and_up_interleaved(w: torch.Tensor) -> torch.Tensor:
    return torch.cat([w[0::2], w[1::2]])


# Wrong between the products: (gate, up) -> h


def sigmoid(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.sigmoid() * up


def gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(gate) * up


def last_block_lost(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return last_of_k_lost(silu(gate, up))


def scale_missing(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return quantise_activations(silu(gate, up), FORMATS["e4m3fn"])[0].float()


def in_fp8_as_it_is(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return fp8(torch.float8_e4m3fn, silu(gate, up))


def one_poor_scale(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """64 times the least that all of h could have."""
    h = silu(gate, up)
    scale = 64 * h.abs().max().clamp(min=1e-30) / 448
    return fp8(torch.float8_e4m3fn, h / scale) * scale


# Wrong in what an expert gives: [m, hidden]


def rows_of_others(y: torch.Tensor) -> torch.Tensor:
    return y.roll(1, 0) if len(y) > 1 else torch.zeros_like(y)


def second_tile_from_the_first(y: torch.Tensor) -> torch.Tensor:
    return put(y, (..., slice(BLOCK, 2 * BLOCK)), y[:, :BLOCK])


IN_FP8: Mapping[str, Plan] = {
    "w13's scale of the next block of N in one block": Plan(weights=scales(w13=in_one_block(next_of_n))),
    "w13's scale of the next block of K in one block": Plan(weights=scales(w13=in_one_block(next_of_k))),
    "w2's scale of the next block of N in one block": Plan(weights=scales(w2=in_one_block(next_of_n))),
    "w2's scale of the next block of K in one block": Plan(weights=scales(w2=in_one_block(next_of_k))),
    "w2's scale squared in one block": Plan(weights=scales(w2=in_one_block(torch.square))),
    "w2's scale left out in one block": Plan(weights=scales(w2=in_one_block(torch.ones_like))),
    "w13's scales of the next block of K": Plan(weights=scales(w13=next_of_k)),
    "w2's scales of the next block of N": Plan(weights=scales(w2=next_of_n)),
    "w13's scales transposed": Plan(weights=scales(w13=transposed)),
    "w2's scales transposed": Plan(weights=scales(w2=transposed)),
    "w13's mean scale for all": Plan(weights=scales(w13=mean)),
    "w2's mean scale for all": Plan(weights=scales(w2=mean)),
    "scales of the next expert": Plan(weights=of_next_expert("w13_scale", "w2_scale")),
    "codes of the next expert": Plan(weights=of_next_expert("w13", "w2")),
    "the next expert": Plan(weights=of_next_expert("w13", "w2", "w13_scale", "w2_scale")),
    "gate and up swapped": Plan(weights=changed(w13=gate_after_up)),
    "gate and up interleaved": Plan(weights=changed(w13=gate_and_up_interleaved)),
    "first block of K left out": Plan(weights=changed(w13=times(0.0, 0))),
    "last block of K left out": Plan(weights=changed(w13=last_of_k_lost)),
    "second block of K counted twice": Plan(weights=changed(w13=times(2.0, 1))),
    "last block of h left out": Plan(act=last_block_lost),
    "first block of h counted twice": Plan(weights=changed(w2=times(2.0, 0))),
    "w13 read a value too far": Plan(weights=changed(w13=lambda w: w.roll(1, 1))),
    "w13 read a row too far": Plan(weights=changed(w13=lambda w: w.roll(1, 0))),
    "w2 read a value too far": Plan(weights=changed(w2=lambda w: w.roll(1, 1))),
    "w2 read a row too far": Plan(weights=changed(w2=lambda w: w.roll(1, 0))),
    "SiLU left out": Plan(act=lambda gate, up: gate * up),
    "sigmoid for SiLU": Plan(act=sigmoid),
    "ReLU for SiLU": Plan(act=lambda gate, up: gate.relu() * up),
    "up left out": Plan(act=lambda gate, up: torch.nn.functional.silu(gate)),
    "1 added to up": Plan(act=lambda gate, up: silu(gate, up + 1)),
    "h in FP8 with its scale missing": Plan(act=scale_missing),
    "h in FP8 as it is": Plan(act=in_fp8_as_it_is),
    "h in FP8 with one poor scale": Plan(act=one_poor_scale),
    "an expert left out": Plan(given=torch.zeros_like),
    "an expert counted twice": Plan(given=lambda y: 2 * y),
    "an expert's output never written": Plan(given=lambda y: torch.full_like(y, math.nan)),
    "an expert's rows given to other tokens": Plan(given=rows_of_others),
    "an expert's last token left out": Plan(given=lambda y: put(y, -1, 0.0)),
    "half of an expert's columns left out": Plan(
        given=lambda y: put(y, (..., slice(y.shape[1] // 2, None)), 0.0)
    ),
    "an expert's second tile of columns from the first": Plan(given=second_tile_from_the_first),
}
"""Of one expert."""

IN_BF16: Mapping[str, Plan] = {
    "w13 in e5m2": Plan(weights=changed(w13=partial(rounded, 3))),
    "w2 in e5m2": Plan(weights=changed(w2=partial(rounded, 3))),
    "GELU for SiLU": Plan(act=gelu),
    "h in fp16": Plan(h=fp16),
    "sums of the first product of 5 bits": Plan(product=partial(by_blocks, total=partial(rounded, 5))),
    "gate and up of 5 bits": Plan(both=partial(rounded, 5)),
}
"""Of one expert, what rounding to FP8 would hide."""

OF_ALL_IN_FP8: Mapping[str, Plan] = {
    "w13 in e5m2": Plan(weights=changed(w13=partial(rounded, 3))),
    "GELU for SiLU": Plan(act=gelu),
    "gate clamped at 7": Plan(act=lambda gate, up: silu(gate.clamp(max=7.0), up)),
}


def busiest(o: Operands) -> int:
    """The expert that is some token's heaviest routed pick on this rank."""
    ids, weights = (each[:, : o.sizes.topk] for each in routing(o))
    return int(ids.flatten()[torch.where(ids < 0, -1.0, weights).argmax()])


def of_one_expert(wrong: Plan, requant: bool = True) -> Compute:
    base, wrong = Plan(requant=requant), replace(wrong, requant=requant)
    return lambda o, right: layer(o, base, others={busiest(o): wrong}).to(right.dtype)


def of_all_experts(wrong: Plan) -> Compute:
    return lambda o, right: layer(o, replace(wrong, requant=True)).to(right.dtype)


# Wrong choices of experts

WrongPicks = Callable[[Operands, torch.Tensor, torch.Tensor], Picks]
"""(operands, ids, weights) -> others"""


def chosen_again(
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
    """The routed picks by another rule."""
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


def by_rule(**rule: Any) -> WrongPicks:
    return partial(chosen_again, **rule)


def weights_of_routed(change: Round) -> WrongPicks:
    def wrong(o: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
        top = o.sizes.topk
        return ids, torch.cat([change(weights[:, :top]), weights[:, top:]], 1)

    return wrong


def heaviest_to(change: Callable[[Operands, torch.Tensor], torch.Tensor]) -> WrongPicks:
    """What becomes of each token's heaviest pick."""

    def wrong(o: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
        at = torch.where(ids < 0, -1.0, weights).argmax(-1, keepdim=True)
        return ids.scatter(1, at, change(o, ids.gather(1, at))), weights

    return wrong


def last_pick_lost(o: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
    return ids[:, : o.sizes.topk - 1], weights[:, : o.sizes.topk - 1]


def shared_weight(value: float) -> WrongPicks:
    return lambda o, ids, weights: (ids, put(weights, (..., slice(o.sizes.topk, None)), value))


PICKS: Mapping[str, WrongPicks] = {
    "bias ignored": by_rule(biased=False),
    "biased scores as weights": by_rule(weigh_biased=True),
    "groups ignored": by_rule(limited=False),
    "groups by their best score": by_rule(of_group=1),
    "one group fewer": by_rule(more_groups=-1),
    "softmax for sigmoid": by_rule(softmax=True),
    "weights not normalised": by_rule(normalised=False),
    "weights not scaled": weights_of_routed(lambda w: w / SCALING),
    "weights of the pick before": weights_of_routed(lambda w: w.roll(1, -1)),
    "weights of the token before": weights_of_routed(lambda w: w.roll(1, 0)),
    "weights of 4 bits": weights_of_routed(lambda w: rounded(4, w.float()).double()),
    "last pick left out": last_pick_lost,
    "heaviest pick left out": heaviest_to(lambda o, ids: torch.full_like(ids, -1)),
    "heaviest pick to the next expert": heaviest_to(lambda o, ids: (ids + 1) % o.sizes.local_experts),
    "picks of the token before": lambda o, ids, weights: (ids.roll(1, 0), weights),
    "experts of other ranks taken for expert 0": lambda o, ids, weights: (ids.clamp(min=0), weights),
    "shared expert left out": shared_weight(0.0),
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


def has_groups(sizes: Sizes) -> bool:
    """Whether the limit leaves out what would be picked without it."""
    groups, limit = sizes.group_limit
    return groups > limit and limit * (sizes.experts // groups) > sizes.topk


def several_blocks(sizes: Sizes) -> bool:
    return min(sizes.hidden, sizes.inter) > BLOCK


def few_blocks(sizes: Sizes) -> bool:
    """Of an expert's few tokens FP8 hides an error in one block of many."""
    return several_blocks(sizes) and sizes.hidden <= 16 * BLOCK


def fits(name: str) -> Callable[[Sizes], bool]:
    if "other ranks" in name:
        return lambda sizes: sizes.ep > 1
    if "shared" in name:
        return lambda sizes: bool(sizes.shared)
    if "group" in name:
        return has_groups
    return few_blocks if "in one block" in name else several_blocks


def listed(
    table: Mapping[str, Any],
    place: Callable[[Any], Compute],
    before: str = "",
    boundary: str = "core",
    activations: str = "bf16",
) -> list[Mistake]:
    return [
        Mistake(before + name, place(wrong), boundary, activations, fits=fits(name))
        for name, wrong in table.items()
    ]


MISTAKES: tuple[Mistake, ...] = (
    *listed(IN_FP8, of_one_expert, boundary="with_quant", activations="fp8"),
    *listed(IN_BF16, partial(of_one_expert, requant=False)),
    *listed(OF_ALL_IN_FP8, of_all_experts, "all experts: ", "with_quant", "fp8"),
    *listed(PICKS, with_picks, boundary="with_routing"),
    *listed(OUTPUTS, lambda compute: compute),
)
