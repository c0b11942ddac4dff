"""Fused MoE in plain torch: the obvious code, torch's fastest products, and torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.formats import dequantise_activations, dequantise_weights
from kernels.fused_moe.layouts import Pair, weights_in_bf16
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes
from kernels.lazy import torch
from kernels.op import Call, Implementation, implementation

ROWS = 4096
"""Tokens that are computed at a time: their gathered rows and the experts' outputs are topk times as large
as x."""


def naive_bytes(sizes: FusedMoeSizes) -> int:
    """One expert in fp32, three times while it is dequantised; x and the sum; the rows of an expert."""
    expert = 2 * sizes.hidden * sizes.inter * 4
    of_expert = sizes.routed.busiest * 4 * (3 * sizes.hidden + 4 * sizes.inter)
    return 3 * expert + sizes.tokens * sizes.hidden * 4 * 2 + of_expert


@implementation(
    "torch.naive",
    requires="torch",
    captures=False,  # the host asks which rows an expert has
    scratch=naive_bytes,
)
def naive(operands: FusedMoeOperands, out: torch.Tensor) -> Call:
    """A loop over the experts that are hit. Each is dequantised in the call; all is in fp32."""
    import torch

    o = operands

    def call() -> None:
        x = dequantise_activations(o.x_q, o.x_scale)
        total = torch.zeros_like(x)
        ids = o.topk_ids.cpu()
        for expert in ids.unique().tolist():
            if not 0 <= expert < len(o.w13):  # of another rank
                continue
            row, place = (each.to(x.device) for each in torch.nonzero(ids == expert, as_tuple=True))
            w13 = dequantise_weights(o.w13[expert], o.w13_scale[expert])
            w2 = dequantise_weights(o.w2[expert], o.w2_scale[expert])
            gate, up = (x[row] @ w13.T).chunk(2, -1)
            given = (torch.nn.functional.silu(gate) * up) @ w2.T
            total.index_add_(0, row, given * o.topk_weights[row, place, None])
        out.copy_(total)

    return call


def _fused_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """The layer by grouped products over (row, expert) pairs in the order of experts, without asking the
    host. Pairs of other ranks come after the last group; their rows hold anything and do not count.

    x: bf16 [tokens, hidden]; w13, w2: bf16, as in FusedMoeOperands; experts: int32 [local], 0, 1, ...
    """
    import torch

    tokens, picks = ids.shape
    key = torch.where(ids < 0, len(experts), ids).flatten()
    key, order = key.sort(stable=True)
    ends = torch.searchsorted(key, experts, right=True, out_int32=True)
    rows = x[order // picks]
    gate, up = torch._grouped_mm(rows, w13.mT, offs=ends).chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    given = torch._grouped_mm(h, w2.mT, offs=ends)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    given = given[place].view(tokens, picks, -1)
    given = torch.where((ids < 0).unsqueeze(-1), 0, given)
    return torch.bmm(weights.unsqueeze(1), given.float())[:, 0]


def in_bf16(operands: FusedMoeOperands) -> Pair:
    """w13 and w2 in bf16: one copy for all calls that read the same w13, which keeps it. A copy for each,
    with twice the bytes of the weights, took most of the time before measuring."""
    w13: Any = operands.w13
    if not hasattr(w13, "with_w2_in_bf16"):
        w13.with_w2_in_bf16 = weights_in_bf16(operands)
    return w13.with_w2_in_bf16


class GroupedMoe(Implementation):
    boundaries = ("core", "with_quant")
    shared_layout = "bf16"

    def layout(self, sizes: FusedMoeSizes) -> int:
        return 2 * sizes.local_experts * sizes.expert_values

    def scratch(self, sizes: FusedMoeSizes) -> int:
        """For each pair a row of x, three times the expert's output in bf16 and once in fp32, gate, up and h;
        x in fp32; the expert that is being dequantised."""
        tokens = min(sizes.tokens, ROWS)
        pairs = tokens * sizes.picks * (sizes.hidden * (2 * 4 + 4) + sizes.inter * 2 * 6 + 64)
        return pairs + tokens * sizes.hidden * 12 + 2 * sizes.hidden * sizes.inter * 8


def grouped(
    operands: FusedMoeOperands, out: torch.Tensor, weights: Pair, function: Callable[..., Any]
) -> Call:
    """Calls the function on ROWS tokens at a time."""
    o, (w13, w2) = operands, weights
    experts = torch.arange(len(w13), dtype=torch.int32, device=w13.device)

    def call() -> None:
        for start in range(0, len(out), ROWS):
            rows = slice(start, start + ROWS)
            if o.x is not None:
                x = o.x[rows]
            else:
                x = dequantise_activations(o.x_q[rows], o.x_scale[rows]).bfloat16()
            out[rows] = function(x, o.topk_ids[rows], o.topk_weights[rows], w13, w2, experts)

    return call


@implementation(
    "torch.bf16",
    GroupedMoe,
    requires="torch with grouped products (2.9 or later; sm_90 or later on cuda)",
    rebinds=True,
    stationary=in_bf16,
)
def bf16(operands: FusedMoeOperands, out: torch.Tensor, weights: Pair) -> Call:
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
def compiled(operands: FusedMoeOperands, out: torch.Tensor, made: tuple[Pair, Callable[..., Any]]) -> Call:
    """`torch.bf16` by the compiler. It does not rebind, as it would compile for each number of tokens."""
    return grouped(operands, out, *made)
