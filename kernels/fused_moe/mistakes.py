"""Kernels of the fused MoE that are wrong in one way each.

Unless its name says otherwise, a kernel is wrong in one expert. Most mistakes are made in calls that quantise
to FP8: the tolerance of these calls is the widest, so there the error is the hardest to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from kernels.arithmetic.fused_moe import Picks, Plan, Weights, by_blocks, dequantised, layer, silu
from kernels.arithmetic.roundings import Round, exact, fp8, fp16
from kernels.formats import BLOCK, FORMATS, quantise_activations
from kernels.fp8_to_fp32 import fp8_to_fp32
from kernels.fused_moe.operands import FusedMoeOperands as Operands
from kernels.fused_moe.reference import routing
from kernels.fused_moe.sizes import SCALING
from kernels.fused_moe.sizes import FusedMoeSizes as Sizes
from kernels.mistakes import Compute, Mistake, put


def rounded(bits: int, x: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest, to so many bits of the significand, of which the leading one counts."""
    step = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - bits)
    return torch.where(x == 0, x, (x / step).round() * step)


# Wrong weights of an expert


def scales(w13: Round = exact, w2: Round = exact) -> Plan:
    """Changes the scales of an expert, fp32 [blocks of N, blocks of K]."""

    def weights(o: Operands, expert: int) -> Weights:
        s13, s2 = w13(o.w13_scale[expert]), w2(o.w2_scale[expert])
        return fp8_to_fp32(o.w13[expert], s13), fp8_to_fp32(o.w2[expert], s2)

    return Plan(weights=weights)


def next_of_n(s: torch.Tensor) -> torch.Tensor:
    return s.roll(-1, 0)


def next_of_k(s: torch.Tensor) -> torch.Tensor:
    return s.roll(-1, 1)


def in_one_block(change: Round) -> Round:
    """Changes only the scale of the block in the middle."""

    def changed(s: torch.Tensor) -> torch.Tensor:
        n, k = (size // 2 for size in s.shape)
        return put(s, (n, k), change(s)[n, k])

    return changed


def of_next_expert(*names: str) -> Plan:
    """names: which of w13, w13_scale, w2 and w2_scale are read from the next expert."""

    def weights(o: Operands, expert: int) -> Weights:
        def of(name: str) -> torch.Tensor:
            at = expert + 1 if name in names else expert
            return getattr(o, name)[at % o.sizes.local_experts]

        return fp8_to_fp32(of("w13"), of("w13_scale")), fp8_to_fp32(of("w2"), of("w2_scale"))

    return Plan(weights=weights)


def changed(w13: Round = exact, w2: Round = exact) -> Plan:
    """Changes the dequantised weights of an expert."""

    def weights(o: Operands, expert: int) -> Weights:
        right13, right2 = dequantised(o, expert)
        return w13(right13), w2(right2)

    return Plan(weights=weights)


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
    return fp8(torch.float8_e4m3fn, h / scale) * scale


def gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(gate) * up


# Wrong outputs of an expert, fp32 [its tokens, hidden]


def of_other_tokens(y: torch.Tensor) -> torch.Tensor:
    return y.roll(1, 0) if len(y) > 1 else torch.zeros_like(y)


def half_left_out(y: torch.Tensor) -> torch.Tensor:
    return put(y, (..., slice(y.shape[1] // 2, None)), 0.0)


IN_FP8: Mapping[str, Plan] = {
    "w13's scale of the next block of N in one block": scales(w13=in_one_block(next_of_n)),
    "w13's scale of the next block of K in one block": scales(w13=in_one_block(next_of_k)),
    "w2's scale of the next block of N in one block": scales(w2=in_one_block(next_of_n)),
    "w2's scale of the next block of K in one block": scales(w2=in_one_block(next_of_k)),
    "w13's scales of the next block of K": scales(w13=next_of_k),
    "w2's scales of the next block of N": scales(w2=next_of_n),
    "w13's scales transposed": scales(w13=lambda s: s.T.reshape(s.shape)),
    "one scale for all of w2": scales(w2=lambda s: s.mean().expand_as(s)),
    "scales of the next expert": of_next_expert("w13_scale", "w2_scale"),
    "codes of the next expert": of_next_expert("w13", "w2"),
    "weights of the next expert": of_next_expert("w13", "w2", "w13_scale", "w2_scale"),
    "gate and up swapped": changed(w13=lambda w: w.roll(len(w) // 2, 0)),
    "gate and up interleaved": changed(w13=lambda w: torch.cat([w[0::2], w[1::2]])),
    "first block of K left out": changed(w13=times(0.0, 0)),
    "last block of K left out": changed(w13=without_last_block),
    "first block of h counted twice": changed(w2=times(2.0, 0)),
    "w13 read a value too far": changed(w13=lambda w: w.roll(1, 1)),
    "w2 read a row too far": changed(w2=lambda w: w.roll(1, 0)),
    "last block of h left out": Plan(act=lambda gate, up: without_last_block(silu(gate, up))),
    "SiLU left out": Plan(act=lambda gate, up: gate * up),
    "sigmoid for SiLU": Plan(act=lambda gate, up: gate.sigmoid() * up),
    "ReLU for SiLU": Plan(act=lambda gate, up: gate.relu() * up),
    "up left out": Plan(act=lambda gate, up: torch.nn.functional.silu(gate)),
    "1 added to up": Plan(act=lambda gate, up: silu(gate, up + 1)),
    "h in FP8 with its scale left out": Plan(act=scale_left_out),
    "h in FP8 without a scale": Plan(act=lambda gate, up: fp8(torch.float8_e4m3fn, silu(gate, up))),
    "h in FP8 with one poor scale": Plan(act=one_poor_scale),
    "an expert left out": Plan(given=torch.zeros_like),
    "an expert counted twice": Plan(given=lambda y: 2 * y),
    "an expert's rows given to other tokens": Plan(given=of_other_tokens),
    "an expert's last token left out": Plan(given=lambda y: put(y, -1, 0.0)),
    "half of an expert's columns left out": Plan(given=half_left_out),
}

IN_BF16: Mapping[str, Plan] = {
    "w13 in e5m2": changed(w13=partial(rounded, 3)),
    "w2 in e5m2": changed(w2=partial(rounded, 3)),
    "GELU for SiLU": Plan(act=gelu),
    "h in fp16": Plan(h=fp16),
    "sums of the first product of 5 bits": Plan(product=partial(by_blocks, total=partial(rounded, 5))),
    "gate and up of 5 bits": Plan(both=partial(rounded, 5)),
}
"""What rounding to FP8 would hide in one expert."""

OF_ALL_EXPERTS_IN_FP8: Mapping[str, Plan] = {
    "w13 in e5m2": changed(w13=partial(rounded, 3)),
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
    *,
    biased: bool = True,
    weigh_biased: bool = False,
    limited: bool = True,
    softmax: bool = False,
    of_group: int = 2,
    more_groups: int = 0,
    normalised: bool = True,
) -> WrongPicks:
    """Picks the routed experts by another rule. The shared expert stays as it is."""

    def picks(o: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
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

    return picks


def weights_of_routed(change: Round) -> WrongPicks:
    def wrong(o: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
        top = o.sizes.topk
        return ids, torch.cat([change(weights[:, :top]), weights[:, top:]], 1)

    return wrong


def heaviest_to(change: Callable[[Operands, torch.Tensor], torch.Tensor]) -> WrongPicks:
    """Changes the expert to which each token gives its largest weight."""

    def wrong(o: Operands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
        at = torch.where(ids < 0, -1.0, weights).argmax(-1, keepdim=True)
        return ids.scatter(1, at, change(o, ids.gather(1, at))), weights

    return wrong


def shared_weight(value: float) -> WrongPicks:
    return lambda o, ids, weights: (ids, put(weights, (..., slice(o.sizes.topk, None)), value))


PICKS: Mapping[str, WrongPicks] = {
    "bias left out": rule(biased=False),
    "biased scores as weights": rule(weigh_biased=True),
    "groups ignored": rule(limited=False),
    "groups by their best score": rule(of_group=1),
    "one group fewer": rule(more_groups=-1),
    "softmax for sigmoid": rule(softmax=True),
    "weights not normalised": rule(normalised=False),
    "weights not scaled": weights_of_routed(lambda w: w / SCALING),
    "weights of 4 bits": weights_of_routed(lambda w: rounded(4, w.float()).double()),
    "last pick left out": lambda o, ids, weights: (
        ids[:, : o.sizes.topk - 1],
        weights[:, : o.sizes.topk - 1],
    ),
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


def limit_matters(sizes: Sizes) -> bool:
    """Whether the limit of groups leaves out experts that would be picked without it."""
    groups, limit = sizes.group_limit
    return groups > limit and limit * (sizes.experts // groups) > sizes.topk


def several_blocks(sizes: Sizes) -> bool:
    return min(sizes.hidden, sizes.inter) > BLOCK


def few_blocks(sizes: Sizes) -> bool:
    """Where an expert has few tokens, rounding to FP8 hides an error in one block of many."""
    return several_blocks(sizes) and sizes.hidden <= 16 * BLOCK


def several_ranks(sizes: Sizes) -> bool:
    return sizes.ep > 1


def has_shared(sizes: Sizes) -> bool:
    return bool(sizes.shared)


FITS: Mapping[str, Callable[[Sizes], bool]] = {
    "experts of other ranks taken for expert 0": several_ranks,
    "shared expert left out": has_shared,
    "shared expert scaled too": has_shared,
    "groups ignored": limit_matters,
    "groups by their best score": limit_matters,
    "one group fewer": limit_matters,
    **{name: few_blocks for name in IN_FP8 if "in one block" in name},
}


def made(name: str, compute: Compute, boundary: str = "core", activations: str = "bf16") -> Mistake:
    return Mistake(name, compute, boundary, activations, fits=FITS.get(name, several_blocks))


MISTAKES: tuple[Mistake, ...] = (
    *(made(name, of_one_expert(plan), "with_quant", "fp8") for name, plan in IN_FP8.items()),
    *(made(name, of_one_expert(plan, requant=False)) for name, plan in IN_BF16.items()),
    *(
        made(f"all experts: {name}", of_all_experts(plan), "with_quant", "fp8")
        for name, plan in OF_ALL_EXPERTS_IN_FP8.items()
    ),
    *(made(name, with_picks(wrong), "with_routing") for name, wrong in PICKS.items()),
    *(made(name, compute) for name, compute in OUTPUTS.items()),
)
