"""A fused MoE layer as kernels compute it, right and wrong, one expert after another. Tensors are fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kernels.arithmetic.roundings import Round, exact
from kernels.formats import BLOCK, dequantise_activations, fp8_format, known_scales, quantise_activations
from kernels.fp8_to_fp32 import fp8_to_fp32
from kernels.fused_moe.operands import FusedMoeOperands as Operands
from kernels.fused_moe.reference import routing

Picks = tuple[torch.Tensor, torch.Tensor]
"""Ids of experts [tokens, picks], -1 for one of another rank, and their weights [tokens, picks]."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [m, K], w [N, K]) -> x @ w^T."""
Weights = tuple[torch.Tensor, torch.Tensor]
"""w13 and w2 of an expert, dequantised."""


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


def dequantised(o: Operands, expert: int) -> Weights:
    return fp8_to_fp32(o.w13[expert], o.w13_scale[expert]), fp8_to_fp32(o.w2[expert], o.w2_scale[expert])


@dataclass(frozen=True)
class Plan:
    """How a kernel computes."""

    x: Round = exact
    """Rounds the activations."""
    weight: Round = exact
    both: Round = exact
    """Rounds gate and up."""
    h: Round = exact
    given: Round = exact
    """Rounds or changes the output of an expert before its weight is applied."""
    weighted: Round = exact
    """Rounds the output of an expert after its weight is applied."""
    total: Round = exact
    """Rounds the sum over experts after each expert."""
    requant: bool = False
    """Whether h is quantised, and x as well unless it is given in FP8."""
    product: Product = whole
    """Multiplies x and w13."""
    down: Product = whole
    """Multiplies h and w2."""
    act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = silu
    """(gate, up) -> h."""
    weights: Callable[[Operands, int], Weights] = dequantised
    """(operands, expert) -> its weights."""


def requantised(o: Operands, x: torch.Tensor) -> torch.Tensor:
    scales = known_scales(o.sizes.scales)
    return dequantise_activations(*quantise_activations(x, fp8_format(o.sizes.fp8), scales))


def activations(o: Operands, plan: Plan) -> torch.Tensor:
    if o.boundary == "core":
        return plan.x(dequantise_activations(o.x_q, o.x_scale))
    return plan.x(requantised(o, o.x.float()) if plan.requant else o.x.float())


def given_by(o: Operands, expert: int, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The output of an expert for some rows of x, before its weight is applied."""
    w13, w2 = (plan.weight(w) for w in plan.weights(o, expert))
    gate, up = plan.both(plan.product(x, w13)).chunk(2, -1)
    h = plan.h(plan.act(gate, up))
    if plan.requant:
        h = requantised(o, h)
    return plan.given(plan.down(h, w2))


def layer(
    o: Operands, plan: Plan, picks: Picks | None = None, others: Mapping[int, Plan] = {}
) -> torch.Tensor:
    """Returns the output [tokens, hidden]. others: the plans of experts that compute in another way."""
    ids, weights = picks or routing(o)
    x = activations(o, plan)
    total = x.new_zeros(len(x), o.sizes.hidden)
    for expert in ids[ids >= 0].unique().tolist():
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        given = given_by(o, expert, x[row], others.get(expert, plan))
        # A wrong choice may give a token the same expert twice, so rows can repeat.
        added = torch.zeros_like(total).index_add_(
            0, row, plan.weighted(given * weights[row, place, None].float())
        )
        total = plan.total(total + added)
    return total
