"""Reference of the fused MoE, expert by expert, and the error that rounding alone explains."""

from __future__ import annotations

from kernels.formats import dequantise_activations, fp8_format, rounding_deviation
from kernels.fp8_to_fp32 import fp8_to_fp32
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes
from kernels.fused_moe.routing import Router, choose
from kernels.lazy import torch
from kernels.op import Reference, affordable, spread

UNIT = 2.0**-9  # the relative root mean square error of rounding to bf16

EXPERT_PAIRS = 100
"""So many pairs of a token and an expert take about as long as the conversion of an expert to fp32."""


def routing(operands: FusedMoeOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """The picks, int64 [tokens, picks] in the rank's numbering, and their weights fp64: the given ones, or
    those that follow from the logits by DeepSeek-V3's rule."""
    if operands.logits is None:
        return operands.topk_ids.long(), operands.topk_weights.double()
    return choose(operands.logits.double(), operands.bias.double(), Router.of(operands.sizes))


def reference(operands: FusedMoeOperands, max_flops: float = float("inf"), offset: float = 0.0) -> Reference:
    """The reference from fp32 products of exact operands, and fp64 sums over experts. An fp32 product of norm
    s, the root of the summed squares of its terms, errs by about 2^-24 sqrt(K) s, which is 5e-6 s at K =
    7168; a sigma is at least 2^-9 s.

    Above MOST_ELEMENTS or `max_flops`, which includes the conversion of each expert, it computes the first
    row, the last row and others, spread evenly.

    sigma: a right call may round these to bf16, each with a relative error of 2^-9 in root mean square: the
    dequantised activations and the weights where they enter products, gate and up, h = silu(gate) * up, the
    output of each expert before and after it is weighted, and the output. Errors of weights and of results
    are independent: their squares add through the products, and through h by its derivatives. An error of x
    is not: it reaches both gate and up. So what it adds to h by gate and what it adds by up are summed as
    they are, without squares. The slope of SiLU is the steepest within two deviations of gate.

    sigma_fp8: the call also rounds h to FP8 by 1x128, and x too unless the boundary is `core`: see
    kernels.formats.rounding_deviation.
    """
    sizes: FusedMoeSizes = operands.sizes
    ids, weights = routing(operands)
    rows = _sampled_rows(ids, sizes, max_flops, offset)
    index = slice(None) if rows is None else rows
    ids, weights = ids[index], weights[index]
    if operands.boundary == "core":
        x = dequantise_activations(operands.x_q[index], operands.x_scale[index])
        x_errors = [x * UNIT]  # one for both kinds of calls, because x is FP8 already
    else:
        x = operands.x[index].float()
        x_errors = [torch.zeros_like(x), rounding_deviation(x, fp8_format(sizes.fp8))]
    value = torch.zeros(len(x), sizes.hidden, dtype=torch.float64, device=x.device)
    variance = torch.zeros(2, *value.shape, dtype=torch.float64, device=x.device)
    host_ids = ids.cpu()
    for expert in host_ids.unique().tolist():
        if not 0 <= expert < len(operands.w13):  # of another rank
            continue
        row, pick = torch.nonzero(host_ids == expert).to(x.device).unbind(1)
        weight = weights[row, pick].unsqueeze(-1)
        y, deviations = _expert(operands, expert, x[row], [error[row] for error in x_errors])
        value.index_add_(0, row, weight * y)
        variance.index_add_(1, row, (weight * deviations) ** 2)
    sigma = (variance + (UNIT * value) ** 2).sqrt()
    return Reference(value, sigma[0], rows, sigma[1])


def _expert(
    operands: FusedMoeOperands, expert: int, x: torch.Tensor, x_errors: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of an expert for rows x fp32 [m, hidden]: [m, hidden]; and its deviations, [2, m, hidden],
    for activations in bf16 and in FP8. x_errors: those of x for these two, or one for both"""
    sizes: FusedMoeSizes = operands.sizes
    # As the deviation of x, x itself gives the norms of terms, in which errors of weights are shares of UNIT.
    gate_up, deviations = _products(
        operands.w13[expert], operands.w13_scale[expert], x, torch.stack([x, *x_errors])
    )
    norms, from_x_bf16, from_x_fp8 = deviations[0], deviations[1], deviations[-1]
    gate, up = gate_up.chunk(2, -1)
    # The errors that rounding the weights and the results makes. They are independent of the error of x.
    own_gate, own_up = (UNIT * torch.hypot(norms, gate_up)).chunk(2, -1)
    silu = gate * gate.sigmoid()
    h = silu * up

    def h_deviation(from_x: torch.Tensor, rounds_to_fp8: bool) -> torch.Tensor:
        x_gate, x_up = from_x.chunk(2, -1)
        all_gate, all_up = torch.hypot(own_gate, x_gate), torch.hypot(own_up, x_up)
        slope = _steepest(gate, 2 * all_gate)
        common = slope * up.abs() * x_gate + silu.abs() * x_up
        independent = torch.hypot(slope * up * own_gate, silu * own_up)
        second_order = slope * all_gate * all_up  # the product of both errors
        # Both h and the weights that it is multiplied by are rounded.
        rounded = torch.hypot(second_order, 2**0.5 * UNIT * h)
        if rounds_to_fp8:
            rounded = torch.hypot(rounded, rounding_deviation(h, fp8_format(sizes.fp8)))
        return torch.hypot(torch.hypot(common, independent), rounded)

    h_deviations = torch.stack([h_deviation(from_x_bf16, False), h_deviation(from_x_fp8, True)])
    y, from_h = _products(operands.w2[expert], operands.w2_scale[expert], h, h_deviations)
    return y, torch.hypot(from_h, 2**0.5 * UNIT * y)  # y is rounded before and after it is weighted


def _steepest(gate: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """The largest of |silu'| at gate - reach, gate and gate + reach."""

    def slope(x: torch.Tensor) -> torch.Tensor:
        sigmoid = x.sigmoid()
        return (sigmoid * (1 + x * (1 - sigmoid))).abs()

    return torch.maximum(slope(gate), torch.maximum(slope(gate - reach), slope(gate + reach)))


def _products(
    q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, deviations: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x @ w^T with w = q * scale, and its deviations sqrt(d^2 @ (w^2)^T) for independent deviations d of x.
    Values are brought near 1 before they are squared, because squares of small scales would underflow.

    q: FP8 [N, K]; x: fp32 [m, K]; deviations: [c, m, K]
    """
    w = fp8_to_fp32(q, scale)
    product = x @ w.T
    tiny = 2.0**-126
    largest_w = w.abs().amax().clamp_(min=tiny)
    largest = deviations.abs().amax(-1, keepdim=True).clamp_(min=tiny)
    squares = (deviations / largest).square_().flatten(0, 1) @ w.div_(largest_w).square_().T
    return product, squares.sqrt_().unflatten(0, deviations.shape[:2]) * largest * largest_w


def _sampled_rows(
    ids: torch.Tensor, sizes: FusedMoeSizes, max_flops: float, offset: float
) -> list[int] | None:
    """The rows that the reference computes; None for all (see `affordable`)."""
    local_experts = [[expert for expert in row if expert >= 0] for row in ids.tolist()]
    converted: set[int] = set()

    def flops(row: int) -> float:
        """Of the row's pairs, and of the conversion of experts that no row before it has."""
        new = set(local_experts[row]) - converted
        converted.update(new)
        return 6 * sizes.hidden * sizes.inter * (len(local_experts[row]) + EXPERT_PAIRS * len(new))

    return affordable([0, len(ids) - 1, *spread(len(ids), offset)], flops, max_flops, sizes.hidden)
