"""The fused MoE in plain torch: right in the ways of its libraries, wrong in many.

`layer` follows the op step by step; a `Plan` says how each step rounds, and a bug replaces a step. A right
kernel's `source` is the file whose arithmetic it follows; "assumed" where that is closed or unread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from harness.prove.arithmetic import Round, bf16, exact, fourteen_bits, fp8, fp16, truncated
from harness.prove.planted import Compute, Planted
from kernels.formats import BLOCK, dequantise_activations, fp8_format, known_scales, quantise_activations
from kernels.fp8_to_fp32 import fp8_to_fp32
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.reference import routing
from kernels.fused_moe.sizes import SCALING, FusedMoeSizes

SIZES = {
    "small": "tokens=24 experts=32 topk=8 hidden=512 inter=256",
    "small fnuz ue8m0": "tokens=24 experts=32 topk=8 hidden=512 inter=256 fp8=e4m3fnuz scales=ue8m0 shared=1",
    "small ep": "tokens=24 experts=64 topk=8 hidden=512 inter=256 ep=4 shared=1",
    "production tp8": "tokens=16 experts=8 topk=4 hidden=7168 inter=256 shared=1",
    "production ep8": "tokens=8 experts=16 topk=8 hidden=7168 inter=2048 ep=16 shared=1",
}

Picks = tuple[torch.Tensor, torch.Tensor]
"""Ids [tokens, picks], -1 on another rank; and their weights."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [m, K], w [N, K] -> x @ w^T."""
Weights = tuple[torch.Tensor, torch.Tensor]
"""Of an expert, dequantised: w13 and w2."""


def whole(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.T


def by_blocks(x: torch.Tensor, w: torch.Tensor, sums: Round = exact, total: Round = exact) -> torch.Tensor:
    """128 of K after the other. sums: how that of a block is rounded; total: the sum so far"""
    out = torch.zeros(len(x), len(w))
    for a, b in zip(x.split(BLOCK, 1), w.split(BLOCK, 1), strict=True):
        out = total(out + sums(a @ b.T))
    return out


def in_parts(x: torch.Tensor, w: torch.Tensor, count: int, partial_sums: Round = exact) -> torch.Tensor:
    """Split K."""
    parts = zip(x.tensor_split(count, 1), w.tensor_split(count, 1), strict=True)
    return torch.stack([partial_sums(a @ b.T) for a, b in parts]).sum(0)


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


@dataclass(frozen=True)
class Plan:
    """How a kernel computes.

    x, weight, both, h: how activations, weights, gate and up, and h are rounded
    given, weighted: how what an expert gives is rounded before and after its weight
    total:     how the sum over experts is rounded after each
    backwards: the last expert comes first
    requant:   h, and x unless it is given in FP8, are quantised
    product:   of x and w13; down: of h and w2
    act:       (gate, up) -> h
    weights:   (operands, expert) -> an expert's, other than the right ones
    after:     what becomes of an expert's output [m, hidden]
    """

    x: Round = exact
    weight: Round = exact
    both: Round = exact
    h: Round = exact
    given: Round = exact
    weighted: Round = exact
    total: Round = exact
    backwards: bool = False
    requant: bool = False
    product: Product = whole
    down: Product = whole
    act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = silu
    weights: Callable[[FusedMoeOperands, int], Weights] | None = None
    after: Round = exact


def right_weights(o: FusedMoeOperands, expert: int) -> Weights:
    return with_scales(o, expert, o.w13_scale[expert], o.w2_scale[expert])


def with_scales(o: FusedMoeOperands, expert: int, s13: torch.Tensor, s2: torch.Tensor) -> Weights:
    return fp8_to_fp32(o.w13[expert], s13), fp8_to_fp32(o.w2[expert], s2)


def requantised(o: FusedMoeOperands, x: torch.Tensor) -> torch.Tensor:
    return dequantise_activations(
        *quantise_activations(x, fp8_format(o.sizes.fp8), known_scales(o.sizes.scales))
    )


def activations(o: FusedMoeOperands, plan: Plan) -> torch.Tensor:
    if o.boundary == "core":
        return plan.x(dequantise_activations(o.x_q, o.x_scale))
    return plan.x(requantised(o, o.x.float()) if plan.requant else o.x.float())


def given_by(o: FusedMoeOperands, expert: int, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """What an expert gives for some rows, before it is weighted."""
    w13, w2 = (plan.weight(w) for w in (plan.weights or right_weights)(o, expert))
    gate, up = plan.both(plan.product(x, w13)).chunk(2, -1)
    h = plan.h(plan.act(gate, up))
    if plan.requant:
        h = requantised(o, h)
    return plan.after(plan.given(plan.down(h, w2)))


def layer(
    o: FusedMoeOperands, plan: Plan, picks: Picks | None = None, only: int | None = None
) -> torch.Tensor:
    """fp32 [tokens, hidden]. only: the one expert that is computed"""
    ids, weights = picks or routing(o)
    x = activations(o, plan)
    total = torch.zeros(len(x), o.sizes.hidden)
    experts = sorted(e for e in ids.unique().tolist() if e >= 0 and only in (None, e))
    for expert in reversed(experts) if plan.backwards else experts:
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        each = plan.weighted(given_by(o, expert, x[row], plan) * weights[row, place, None].float())
        # Some bugs give a token the same expert twice.
        added = torch.zeros_like(total).index_add_(0, row, each)
        total = plan.total(total + added)
    return total


_last: dict[Plan, tuple[FusedMoeOperands, torch.Tensor]] = {}


def layer_once(o: FusedMoeOperands, plan: Plan) -> torch.Tensor:
    """Computed once for the bugs that change a part of it."""
    known = _last.get(plan)
    if known is None or known[0] is not o:
        known = _last[plan] = (o, layer(o, plan))
    return known[1]


def every(plan: Plan, output: Round = bf16) -> Compute:
    return lambda o, right: output(layer(o, plan)).bfloat16()


# Right

FP8 = Plan(requant=True)
BF16 = Plan(bf16, bf16, bf16, bf16, bf16, bf16)
HOPPER = partial(by_blocks, sums=fourteen_bits)
VLLM = "vLLM 0.33 vllm/model_executor/layers/fused_moe/fused_moe.py:548-601"
RIGHT: dict[str, tuple[Plan, str]] = {
    "fp32": (Plan(), "kernels/fused_moe/providers/torch_eager.py"),
    "bf16 everywhere": (BF16, "torch 2.13, bf16 matmul"),
    "bf16 products": (Plan(x=bf16, weight=bf16, h=bf16), "assumed: vLLM's CPU kernels"),
    "bf16 weights": (Plan(weight=bf16), "assumed"),
    "bf16 between the products": (Plan(both=bf16, h=bf16), "assumed"),
    "bf16 results of experts": (Plan(given=bf16, weighted=bf16), "assumed"),
    "the sum in bf16 after each expert": (Plan(given=bf16, total=bf16), "assumed"),
    "the same, last first": (Plan(total=bf16, backwards=True), "assumed"),
    "last expert first": (Plan(backwards=True), "assumed"),
    "up product split in 4": (
        Plan(product=partial(in_parts, count=4)),
        "kernels/fused_moe/triton/grouped.py",
    ),
    "both products split in 2": (
        Plan(product=partial(in_parts, count=2), down=partial(in_parts, count=2)),
        "assumed",
    ),
    "blocks of K": (Plan(product=by_blocks, down=by_blocks), "assumed"),
}
RIGHT_FP8: dict[str, tuple[Plan, str]] = {
    "fp32 elsewhere": (FP8, "kernels/fused_moe/triton/grouped.py"),
    "bf16 elsewhere": (replace(FP8, both=bf16, h=bf16, given=bf16, weighted=bf16), "assumed"),
    "dequantised to bf16": (replace(BF16, requant=True), "assumed"),
    "Hopper's 14 bits": (
        replace(FP8, product=HOPPER, down=HOPPER, both=bf16, given=bf16),
        "assumed: DeepGEMM on Hopper",
    ),
    "blocks of K": (replace(FP8, product=by_blocks, down=by_blocks, both=bf16, weighted=bf16), VLLM),
    "the sum in bf16 after each expert": (replace(FP8, total=bf16), "assumed"),
    "the sum truncated after each expert": (
        replace(FP8, total=truncated),
        "assumed: AITER's atomics in bf16",
    ),
    "last expert first": (replace(FP8, backwards=True, given=bf16), "assumed"),
    "up product split in 4": (replace(FP8, product=partial(in_parts, count=4)), "assumed"),
    "weighted results in bf16": (replace(FP8, weighted=bf16), "assumed"),
}


def right() -> list[Planted]:
    planted = []
    for boundary in ("core", "with_quant", "with_routing"):
        words = "" if boundary == "core" else f" {boundary}"
        plans = [(name, *rest, "bf16") for name, rest in RIGHT.items()]
        plans += [(name, *rest, "fp8") for name, rest in RIGHT_FP8.items()]
        if boundary == "with_routing":
            plans = [
                p for p in plans if p[0] in ("fp32", "bf16 everywhere", "fp32 elsewhere", "bf16 elsewhere")
            ]
        for name, plan, source, kind in plans:
            planted.append(
                Planted(
                    f"right{words} in {kind}: {name}",
                    every(plan),
                    right=True,
                    boundary=boundary,
                    activations=kind,
                    source=source,
                )
            )
    return planted


# Wrong in an expert: (operands, plan) -> another plan

Change = Callable[[FusedMoeOperands, Plan], Plan]


def scale_moved(name: str, dim: int, all_blocks: bool = False) -> Change:
    """A block takes the scale of the next one along `dim`, or all do."""

    def weights(o: FusedMoeOperands, expert: int) -> Weights:
        both = {"w13": o.w13_scale[expert], "w2": o.w2_scale[expert]}
        rolled = both[name].roll(-1, dim)
        if not all_blocks:
            n, k = (size // 2 for size in rolled.shape)
            moved = both[name].clone()
            moved[n, k] = rolled[n, k]
            rolled = moved
        both[name] = rolled
        return with_scales(o, expert, both["w13"], both["w2"])

    return lambda o, plan: replace(plan, weights=weights)


def scales_changed(change13: Round = exact, change2: Round = exact) -> Change:
    def weights(o: FusedMoeOperands, expert: int) -> Weights:
        return with_scales(o, expert, change13(o.w13_scale[expert]), change2(o.w2_scale[expert]))

    return lambda o, plan: replace(plan, weights=weights)


def turned(s: torch.Tensor) -> torch.Tensor:
    return s.T.reshape(s.shape)


def one_block(value: Callable[[torch.Tensor], torch.Tensor], n: int, k: int) -> Round:
    """Another scale in one block."""

    def change(s: torch.Tensor) -> torch.Tensor:
        s = s.clone()
        s[n, k] = value(s[n, k])
        return s

    return change


def of_next_expert(scales: bool = True, codes: bool = True, w13: bool = True, w2: bool = True) -> Change:
    def weights(o: FusedMoeOperands, expert: int) -> Weights:
        other = (expert + 1) % o.sizes.local_experts

        def of(name: str, moved: bool) -> torch.Tensor:
            q, s = getattr(o, name), getattr(o, f"{name}_scale")
            return fp8_to_fp32(
                q[other if moved and codes else expert], s[other if moved and scales else expert]
            )

        return of("w13", w13), of("w2", w2)

    return lambda o, plan: replace(plan, weights=weights)


def weights_changed(change: Callable[[torch.Tensor, torch.Tensor], Weights]) -> Change:
    return lambda o, plan: replace(plan, weights=lambda o, e: change(*right_weights(o, e)))


def halves_swapped(w13: torch.Tensor, w2: torch.Tensor) -> Weights:
    return w13.roll(len(w13) // 2, 0), w2


def interleaved(w13: torch.Tensor, w2: torch.Tensor) -> Weights:
    """Rows of gate and up are taken for rows in turn."""
    return torch.cat([w13[0::2], w13[1::2]]), w2


def k_block(which: int, times: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(w: torch.Tensor) -> torch.Tensor:
        w = w.clone()
        first = which % (w.shape[1] // BLOCK) * BLOCK
        w[:, first : first + BLOCK] *= times
        return w

    return change


def rolled(by: int, dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda w: w.roll(by, dim)


def up_only(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return weights_changed(lambda w13, w2: (change(w13), w2))


def down_only(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return weights_changed(lambda w13, w2: (w13, change(w2)))


def acts(act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Change:
    return lambda o, plan: replace(plan, act=act)


def outputs(after: Round) -> Change:
    return lambda o, plan: replace(plan, after=after)


def columns(change: Callable[[torch.Tensor], None]) -> Change:
    def after(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        change(y)
        return y

    return outputs(after)


def last_row_lost(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[-1] = 0
    return y


def rows_turned(y: torch.Tensor) -> torch.Tensor:
    return y.roll(1, 0) if len(y) > 1 else torch.zeros_like(y)


def second_half_lost(y: torch.Tensor) -> None:
    y[:, y.shape[1] // 2 :] = 0


def tile_from_before(y: torch.Tensor) -> None:
    y[:, BLOCK : 2 * BLOCK] = y[:, :BLOCK].clone()


def last_block_negative(y: torch.Tensor) -> None:
    y[:, -BLOCK:] *= -1


def gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(gate) * up


def h_last_block_lost(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    h = silu(gate, up)
    h[:, -BLOCK:] = 0
    return h


def h_scale_missing(o: FusedMoeOperands, plan: Plan) -> Plan:
    """h is quantised and its scale not multiplied back."""
    fmt = fp8_format(o.sizes.fp8)
    return replace(plan, act=lambda gate, up: quantise_activations(silu(gate, up), fmt)[0].float())


def h_without_scale(o: FusedMoeOperands, plan: Plan) -> Plan:
    """h is cast to FP8 as it is."""
    return replace(plan, act=lambda gate, up: fp8(o.w13.dtype, silu(gate, up)))


def h_of_tensor(o: FusedMoeOperands, plan: Plan) -> Plan:
    """One scale for all of h, of the least that it could be 64 times."""

    def act(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        h = silu(gate, up)
        scale = 64 * h.abs().max().clamp(min=1e-30) / fp8_format(o.sizes.fp8).max
        return fp8(o.w13.dtype, h / scale) * scale

    return replace(plan, act=act)


def few_bits(count: int, x: torch.Tensor) -> torch.Tensor:
    step = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - count)
    return torch.where(x == 0, x, (x / step).round() * step)


def unscaled_fp16(o: FusedMoeOperands, plan: Plan) -> Plan:
    """Products of codes are summed in fp16, before they are scaled."""

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, scale = quantise_activations(x, fp8_format(o.sizes.fp8), "fp32")
        peak = w.abs().unflatten(1, (-1, BLOCK)).amax(-1).clamp(min=1e-30) / fp8_format(o.sizes.fp8).max
        out = torch.zeros(len(x), len(w))
        for k in range(w.shape[1] // BLOCK):
            block = slice(BLOCK * k, BLOCK * (k + 1))
            part = fp16(q[:, block].float() @ (w[:, block] / peak[:, k, None]).T)
            out += part * scale[:, k, None] * peak[None, :, k]
        return out

    return replace(plan, product=product)


def rounded(**steps: Round) -> Change:
    return lambda o, plan: replace(plan, **steps)  # type: ignore[arg-type]


EXPERT_BUGS: dict[str, Change] = {
    **{
        f"{name}'s scale of the next block of {'NK'[dim]}, {'all' if all_blocks else 'one'}": scale_moved(
            name, dim, all_blocks
        )
        for name in ("w13", "w2")
        for dim in (0, 1)
        for all_blocks in (False, True)
    },
    "w13's scales transposed": scales_changed(turned),
    "w2's scales transposed": scales_changed(change2=turned),
    "w13's mean scale for all": scales_changed(lambda s: s.mean().expand_as(s)),
    "w2's mean scale for all": scales_changed(change2=lambda s: s.mean().expand_as(s)),
    "w13's scale forgotten in one block": scales_changed(one_block(torch.ones_like, 0, 0)),
    "w2's scale forgotten in one block": scales_changed(change2=one_block(torch.ones_like, -1, -1)),
    "w2's scale squared in one block": scales_changed(change2=one_block(torch.square, 1, 0)),
    "scales of the next expert": of_next_expert(codes=False),
    "w2's scales of the next expert": of_next_expert(codes=False, w13=False),
    "codes of the next expert": of_next_expert(scales=False),
    "w13 of the next expert": of_next_expert(w2=False),
    "w2 of the next expert": of_next_expert(w13=False),
    "the next expert": of_next_expert(),
    "gate and up swapped": weights_changed(halves_swapped),
    "gate and up interleaved": weights_changed(interleaved),
    "first block of K lost": up_only(k_block(0, 0.0)),
    "last block of K lost": up_only(k_block(-1, 0.0)),
    "middle block of K twice": up_only(k_block(1, 2.0)),
    "last block of h lost": acts(h_last_block_lost),
    "first block of h twice": down_only(k_block(0, 2.0)),
    "w13 read a value too far": up_only(rolled(1, 1)),
    "w13 read a row too far": up_only(rolled(1, 0)),
    "w2 read a value too far": down_only(rolled(1, 1)),
    "w2 read a row too far": down_only(rolled(1, 0)),
    "w2 read a block too far": down_only(rolled(BLOCK, 1)),
    "w13 in e5m2": up_only(partial(few_bits, 3)),
    "w2 in e5m2": down_only(partial(few_bits, 3)),
    "SiLU forgotten": acts(lambda gate, up: gate * up),
    "sigmoid for SiLU": acts(lambda gate, up: gate.sigmoid() * up),
    "GELU for SiLU": acts(gelu),
    "ReLU for SiLU": acts(lambda gate, up: gate.relu() * up),
    "SiLU of up": acts(lambda gate, up: silu(up, gate)),
    "up forgotten": acts(lambda gate, up: torch.nn.functional.silu(gate)),
    "gate clamped at 7": acts(lambda gate, up: silu(gate.clamp(max=7.0), up)),
    "1 added to up": acts(lambda gate, up: silu(gate, up + 1)),
    "h's scale missing": h_scale_missing,
    "h in FP8 without scales": h_without_scale,
    "one poor scale for all of h": h_of_tensor,
    "fp16 sums of codes": unscaled_fp16,
    "sums of the up product of 5 bits after each block": rounded(
        product=partial(by_blocks, total=partial(few_bits, 5))
    ),
    "gate and up of 5 bits": rounded(both=partial(few_bits, 5)),
    "nothing": outputs(torch.zeros_like),
    "NaN": outputs(lambda y: torch.full_like(y, torch.nan)),
    "negative": outputs(torch.neg),
    "twice": outputs(lambda y: 2 * y),
    "rows of other tokens": outputs(rows_turned),
    "last token lost": outputs(last_row_lost),
    "second half of the columns lost": columns(second_half_lost),
    "second tile of columns from the first": columns(tile_from_before),
    "last tile of columns negative": columns(last_block_negative),
}


def busiest(o: FusedMoeOperands) -> int:
    """The expert that is some token's heaviest routed pick on this rank."""
    ids, weights = (each[:, : o.sizes.topk] for each in routing(o))
    return int(ids.flatten()[torch.where(ids < 0, -1.0, weights).argmax()])


def in_one_expert(change: Change, plan: Plan) -> Compute:
    def compute(o: FusedMoeOperands, right: torch.Tensor) -> torch.Tensor:
        expert = busiest(o)
        was, wrong = layer(o, plan, only=expert), layer(o, change(o, plan), only=expert)
        return (layer_once(o, plan) - was + wrong).bfloat16()

    return compute


def in_all_experts(change: Change, plan: Plan) -> Compute:
    return lambda o, right: layer(o, change(o, plan)).bfloat16()


# Wrong picks: (operands, ids, weights) -> others

WrongPicks = Callable[[FusedMoeOperands, torch.Tensor, torch.Tensor], Picks]


def chosen_again(
    o: FusedMoeOperands,
    ids: torch.Tensor,
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
        kept = sums.topk(max(1, min(groups, limit + more_groups)), -1).indices
        allowed = torch.zeros(len(by), groups, dtype=torch.bool).scatter(1, kept, True)
        grouped = grouped.masked_fill(~allowed[..., None], -9.0)
    again = grouped.flatten(1).topk(o.sizes.topk, -1).indices
    weights = (by if weigh_biased else own).gather(1, again)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * SCALING
    again = torch.where(again < o.sizes.routed.local, again, -1)
    rest = ids[:, o.sizes.topk :]
    return torch.cat([again, rest], 1), torch.cat([weights, torch.ones_like(rest).double()], 1)


def by_rule(**rule: Any) -> WrongPicks:
    return lambda o, ids, weights: chosen_again(o, ids, **rule)


def routed_weights(change: Round) -> WrongPicks:
    """Of the routed picks."""

    def wrong(o: FusedMoeOperands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
        top = o.sizes.topk
        return ids, torch.cat([change(weights[:, :top]), weights[:, top:]], 1)

    return wrong


def heavy(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.where(ids < 0, -1.0, weights).argmax(-1, keepdim=True)


def to_another(shift: int) -> WrongPicks:
    def wrong(o: FusedMoeOperands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
        at = heavy(ids, weights)
        return ids.scatter(1, at, (ids.gather(1, at) + shift) % o.sizes.local_experts), weights

    return wrong


def heaviest_lost(o: FusedMoeOperands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
    return ids.scatter(1, heavy(ids, weights), -1), weights


def elsewhere_is(expert: Callable[[FusedMoeOperands], int]) -> WrongPicks:
    return lambda o, ids, weights: (torch.where(ids < 0, expert(o), ids), weights)


def shared_weight(value: float) -> WrongPicks:
    def wrong(o: FusedMoeOperands, ids: torch.Tensor, weights: torch.Tensor) -> Picks:
        weights = weights.clone()
        weights[:, o.sizes.topk :] = value
        return ids, weights

    return wrong


PICK_BUGS: dict[str, WrongPicks] = {
    "bias ignored": by_rule(biased=False),
    "biased scores as weights": by_rule(weigh_biased=True),
    "groups ignored": by_rule(limited=False),
    "groups by their best score": by_rule(of_group=1),
    "a group more": by_rule(more_groups=1),
    "a group fewer": by_rule(more_groups=-1),
    "softmax for sigmoid": by_rule(softmax=True),
    "not normalised": by_rule(normalised=False),
    "not scaled": routed_weights(lambda w: w / SCALING),
    "scaled twice": routed_weights(lambda w: w * SCALING),
    "all weights alike": routed_weights(lambda w: w.mean(-1, keepdim=True).expand_as(w)),
    "weights of the pick before": routed_weights(lambda w: w.roll(1, -1)),
    "weights of the token before": routed_weights(lambda w: w.roll(1, 0)),
    "weights squared": routed_weights(torch.square),
    "weights of 4 bits": routed_weights(lambda w: few_bits(4, w.float()).double()),
    "last pick lost": lambda o, ids, weights: (ids[:, : o.sizes.topk - 1], weights[:, : o.sizes.topk - 1]),
    "heaviest pick lost": heaviest_lost,
    "heaviest pick to the next expert": to_another(1),
    "heaviest pick to the expert before": to_another(-1),
    "all picks to the next expert": lambda o, ids, weights: (
        torch.where(ids < 0, ids, (ids + 1) % o.sizes.local_experts),
        weights,
    ),
    "picks of the token before": lambda o, ids, weights: (ids.roll(1, 0), weights),
    "elsewhere is expert 0": elsewhere_is(lambda o: 0),
    "elsewhere is the last": elsewhere_is(lambda o: o.sizes.local_experts - 1),
    "shared expert lost": shared_weight(0.0),
    "shared expert scaled too": shared_weight(SCALING),
}


def anything(sizes: FusedMoeSizes) -> bool:
    return True


def of_few_blocks(sizes: FusedMoeSizes) -> bool:
    return sizes.hidden <= 16 * BLOCK


def has_shared(sizes: FusedMoeSizes) -> bool:
    return bool(sizes.shared)


def has_elsewhere(sizes: FusedMoeSizes) -> bool:
    return sizes.ep > 1


def has_groups(sizes: FusedMoeSizes) -> bool:
    """Whether the limit leaves out what would be picked without it."""
    groups, limit = sizes.group_limit
    return groups > limit and limit * (sizes.experts // groups) > sizes.topk


def token_of(o: FusedMoeOperands, wrong: Picks) -> int:
    """The token for which picks change most, of those that hear something."""
    experts = o.sizes.local_experts + 1

    def dense(picks: Picks) -> torch.Tensor:
        ids, weights = picks
        counts = torch.zeros(len(ids), experts, dtype=torch.float64)
        return counts.scatter_add_(1, ids % experts, weights.double())[:, :-1]

    loud = activations(o, Plan()).norm(dim=1) > 0
    change = (dense(wrong) - dense(routing(o))).norm(dim=-1) / dense(routing(o)).norm(dim=-1).clamp(min=1e-9)
    return int(torch.where(loud, change, -1.0).argmax())


def with_picks(wrong: WrongPicks, plan: Plan, one_token: bool) -> Compute:
    def compute(o: FusedMoeOperands, right: torch.Tensor) -> torch.Tensor:
        picks = wrong(o, *routing(o))
        out = layer(o, plan, picks).bfloat16()
        if not one_token:
            return out
        token = token_of(o, picks)
        right[token] = out[token]
        return right

    return compute


# Wrong outputs


def last_row_unwritten(o: FusedMoeOperands, right: torch.Tensor) -> torch.Tensor:
    right[-1] = torch.nan
    return right


def first_tokens_swapped(o: FusedMoeOperands, right: torch.Tensor) -> torch.Tensor:
    return torch.cat([right[1:2], right[:1], right[2:]])


def row_from_before(o: FusedMoeOperands, right: torch.Tensor) -> torch.Tensor:
    right[1] = right[0]
    return right


def tile_zero(o: FusedMoeOperands, right: torch.Tensor) -> torch.Tensor:
    right[0, -BLOCK:] = 0
    return right


def value_off(o: FusedMoeOperands, right: torch.Tensor) -> torch.Tensor:
    right[0, 5] = right[0, 6] + right[0].abs().max()
    return right


OUTPUT_BUGS: dict[str, Compute] = {
    "last row unwritten": last_row_unwritten,
    "first tokens swapped": first_tokens_swapped,
    "a row from the one before": row_from_before,
    "a tile of zeros": tile_zero,
    "one value off": value_off,
    "5 % more": lambda o, right: 1.05 * right,
    "1 % more": lambda o, right: 1.01 * right,
    "3 % less": lambda o, right: 0.97 * right,
    "6 bits": lambda o, right: few_bits(5, right.float()).bfloat16(),
    "all zeros": lambda o, right: torch.zeros_like(right),
}


def picks_fit(name: str) -> Callable[[Any], bool]:
    if name.startswith("elsewhere"):
        return has_elsewhere
    if name.startswith("shared"):
        return has_shared
    return has_groups if "group" in name else anything


COARSE = "rounding x and h to FP8 errs as much"
FINE = {
    "in one expert, in FP8: w13 in e5m2": COARSE,
    "in one expert, in FP8: w2 in e5m2": COARSE,
    "in all, in FP8: w2 in e5m2": COARSE,
    "in one expert, in FP8: GELU for SiLU": "for few tokens, rounding h to FP8 errs as much",
    "in one expert, in FP8: gate clamped at 7": "few gates of an expert's tokens are larger",
    "in one expert, in FP8: sums of the up product of 5 bits after each block": COARSE,
    "in all, in FP8: sums of the up product of 5 bits after each block": COARSE,
    "in one expert, in FP8: gate and up of 5 bits": COARSE,
    "in all, in FP8: gate and up of 5 bits": COARSE,
}
"""Why a bug lies within what rounding explains."""


def bugs() -> list[Planted]:
    planted = []
    for name, change in EXPERT_BUGS.items():
        # Of an expert's few tokens, FP8 hides an error in one block of many.
        few_blocks = of_few_blocks if name.endswith((", one", "in one block")) else anything
        for where, make in (("in one expert", in_one_expert), ("in all", in_all_experts)):
            planted.append(Planted(f"{where}: {name}", make(change, Plan())))
            planted.append(
                Planted(
                    f"{where}, in FP8: {name}",
                    make(change, FP8),
                    boundary="with_quant",
                    activations="fp8",
                    fits=few_blocks,
                )
            )
    for name, wrong in PICK_BUGS.items():
        for where, for_one in (("for one token", True), ("for all", False)):
            fits = picks_fit(name)
            planted.append(
                Planted(
                    f"{where}: {name}", with_picks(wrong, Plan(), for_one), boundary="with_routing", fits=fits
                )
            )
    planted += [Planted(f"output: {name}", compute) for name, compute in OUTPUT_BUGS.items()]
    return [replace(p, fine=FINE.get(p.name, "")) for p in planted]


PLANTED: list[Planted] = [*right(), *bugs()]
