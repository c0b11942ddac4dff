"""Fused MoE in plain torch: the obvious code, torch's fastest products, and torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.formats import dequantise_activations, dequantise_weights
from kernels.fused_moe.layouts import W13AndW2, weights_in_bf16
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes
from kernels.lazy import torch
from kernels.op import Call, Implementation, implementation

ROWS = 4096
"""Tokens that are computed at a time: the rows of their pairs are topk times as large as x."""


def naive_bytes(sizes: FusedMoeSizes) -> int:
    """In fp32: w13 of an expert, three times while it is dequantised; x and the sum; for each row of an
    expert its x, its output before and after it is weighted, gate, up, SiLU and h."""
    w13 = 2 * sizes.hidden * sizes.inter
    rows = sizes.routed.busiest * (3 * sizes.hidden + 4 * sizes.inter)
    return 4 * (3 * w13 + 2 * sizes.tokens * sizes.hidden + rows)


@implementation(
    "torch.naive",
    requires="torch",
    captures=False,  # the host asks which rows an expert has
    scratch=naive_bytes,
)
def naive(operands: FusedMoeOperands, out: torch.Tensor) -> Call:
    """A loop over the experts that are hit, in fp32. Each expert is dequantised in the call."""
    import torch

    def call() -> None:
        x = dequantise_activations(operands.x_q, operands.x_scale)
        total = torch.zeros_like(x)
        ids = operands.topk_ids.cpu()
        for expert in ids[ids >= 0].unique().tolist():  # the others are of another rank
            row, pick = torch.nonzero(ids == expert).to(x.device).unbind(1)
            w13 = dequantise_weights(operands.w13[expert], operands.w13_scale[expert])
            w2 = dequantise_weights(operands.w2[expert], operands.w2_scale[expert])
            gate, up = (x[row] @ w13.T).chunk(2, -1)
            expert_out = (torch.nn.functional.silu(gate) * up) @ w2.T
            total.index_add_(0, row, expert_out * operands.topk_weights[row, pick, None])
        out.copy_(total)

    return call


def _fused_moe(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    w13: torch.Tensor, w2: torch.Tensor, experts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The layer by grouped products over (token, expert) pairs in the order of experts, without a wait for
    the host. Pairs of other ranks come after the last group. Zeros replace their rows, which are undefined.

    x: bf16 [tokens, hidden]; w13, w2: bf16, as in FusedMoeOperands; experts: int32 [local], 0, 1, ...
    """
    import torch

    tokens, picks = ids.shape
    group = torch.where(ids < 0, len(experts), ids).flatten()
    sorted_groups, order = group.sort(stable=True)
    ends = torch.searchsorted(sorted_groups, experts, right=True, out_int32=True)
    rows = x[order // picks]
    gate, up = torch._grouped_mm(rows, w13.mT, offs=ends).chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    expert_out = torch._grouped_mm(h, w2.mT, offs=ends)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    expert_out = expert_out[place].view(tokens, picks, -1)  # in the order of pairs
    expert_out = torch.where((ids < 0).unsqueeze(-1), 0, expert_out)
    return torch.bmm(weights.unsqueeze(1), expert_out.float())[:, 0]


def in_bf16(operands: FusedMoeOperands) -> W13AndW2:
    """w13 and w2 in bf16: one copy, an attribute of the w13 tensor, for all calls that read the same w13. A
    copy for each call, of twice the bytes of the weights, took most of the time before measuring."""
    w13: Any = operands.w13
    if not hasattr(w13, "with_w2_in_bf16"):
        w13.with_w2_in_bf16 = weights_in_bf16(operands)
    return w13.with_w2_in_bf16


class GroupedMoe(Implementation):
    """Calls of `_fused_moe` on weights in bf16."""

    boundaries = ("core", "with_quant")
    shared_layout = "bf16"

    def layout(self, sizes: FusedMoeSizes) -> int:
        return 2 * sizes.local_experts * sizes.expert_values

    def scratch(self, sizes: FusedMoeSizes) -> int:
        """For each pair a row of x and three times the expert's output in bf16, this once more in fp32, six
        times as many values as h has in bf16 (gate, up, SiLU and h), and eight indexes in int64. For each
        token three rows in fp32 (x and the sums). w13 of an expert, twice in fp32 while it is dequantised."""
        hidden, inter = sizes.hidden, sizes.inter
        of_pair = hidden * (2 * 4 + 4) + 2 * 6 * inter + 8 * 8
        of_token = sizes.picks * of_pair + 3 * 4 * hidden
        return min(sizes.tokens, ROWS) * of_token + 2 * 4 * (2 * hidden * inter)


def grouped(
    operands: FusedMoeOperands, out: torch.Tensor, weights: W13AndW2, function: Callable[..., Any]
) -> Call:
    """A call of `_fused_moe`, or of what the compiler made of it, on ROWS tokens at a time."""
    w13, w2 = weights
    experts = torch.arange(len(w13), dtype=torch.int32, device=w13.device)

    def call() -> None:
        for start in range(0, len(out), ROWS):
            rows = slice(start, start + ROWS)
            if operands.x is not None:
                x = operands.x[rows]
            else:
                x = dequantise_activations(operands.x_q[rows], operands.x_scale[rows]).bfloat16()
            out[rows] = function(x, operands.topk_ids[rows], operands.topk_weights[rows], w13, w2, experts)

    return call


@implementation(
    "torch.bf16",
    GroupedMoe,
    requires="torch with grouped products (2.9 or later; sm_90 or later on cuda)",
    rebinds=True,
    stationary=in_bf16,
)
def bf16(operands: FusedMoeOperands, out: torch.Tensor, weights: W13AndW2) -> Call:
    """The weights are dequantised once. A call makes grouped bf16 products (torch's own kernels, W16A16)."""
    return grouped(operands, out, weights, _fused_moe)


@implementation(
    "torch.compile",
    GroupedMoe,
    requires="torch with its compiler (a C++ compiler on cpu, Triton on cuda and rocm)",
    per_size=True,
    available=lambda platform: platform.compiler(),
    stationary=lambda operands: (in_bf16(operands), torch.compile(_fused_moe, dynamic=False)),
)
def compiled(
    operands: FusedMoeOperands, out: torch.Tensor, stationary: tuple[W13AndW2, Callable[..., Any]]
) -> Call:
    """`torch.bf16` by the compiler. It does not rebind, as it would compile for each number of tokens."""
    weights, function = stationary
    return grouped(operands, out, weights, function)
