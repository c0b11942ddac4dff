"""Fused MoE in plain torch: what one writes first, what torch does best, what its compiler makes of it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from kernels.formats import dequantise_activations, dequantise_weights
from kernels.fp8_to_fp32 import fp8_to_bf16
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Implementation, Prepared
from kernels.platform import Platform
from kernels.support import Support

if TYPE_CHECKING:
    import torch
    from torch.utils.weak import WeakIdKeyDictionary

ROWS = 4096
"""Tokens at a time: gathered rows and what experts give for each are topk times as large as x."""


class NaiveMoe(Implementation):
    """A loop over the experts that are hit, each dequantised in the call, all in fp32."""

    name = "torch.naive"
    requires = "torch"
    captures = False  # the host asks which rows an expert has

    def available(self, platform: Platform) -> Support:
        return platform.library("torch")

    def scratch(self, sizes: FusedMoeSizes) -> int:
        """One expert in fp32, three times while it is dequantised; x and the sum; the rows of an expert."""
        expert = 2 * sizes.hidden * sizes.inter * 4
        of_expert = sizes.routed.busiest * 4 * (3 * sizes.hidden + 4 * sizes.inter)
        return 3 * expert + sizes.tokens * sizes.hidden * 4 * 2 + of_expert

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return _NaiveMoe(operands, out)


class _NaiveMoe(Prepared):
    operands: FusedMoeOperands

    def call(self) -> None:
        import torch

        o = self.operands
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
        self.out.copy_(total)


def _fused_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """Grouped products over (row, expert) pairs in order of experts; nothing is asked of the host.

    x: bf16 [tokens, hidden]; w13, w2: bf16, as in FusedMoeOperands; experts: int32 [local], 0, 1, ...
    Pairs of other ranks stand behind the last group: their rows hold anything and count nothing.
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


class _Bf16Moe(Prepared):
    """Weights dequantised to bf16."""

    function = staticmethod(_fused_moe)

    operands: FusedMoeOperands

    def __init__(self, operands: FusedMoeOperands, out: torch.Tensor) -> None:
        import torch

        super().__init__(operands, out)
        known = _bf16_weights()
        if operands.w13 not in known:
            known[operands.w13] = (
                _dequantised(operands.w13, operands.w13_scale),
                _dequantised(operands.w2, operands.w2_scale),
            )
        self.w13, self.w2 = known[operands.w13]
        self.experts = torch.arange(len(self.w13), dtype=torch.int32, device=self.w13.device)

    def call(self) -> None:
        o = self.operands
        for start in range(0, len(self.out), ROWS):
            rows = slice(start, start + ROWS)
            if o.x is not None:
                x = o.x[rows]
            else:
                x = dequantise_activations(o.x_q[rows], o.x_scale[rows]).bfloat16()
            ids, weights = o.topk_ids[rows], o.topk_weights[rows]
            self.out[rows] = self.function(x, ids, weights, self.w13, self.w2, self.experts)


@functools.cache
def _bf16_weights() -> WeakIdKeyDictionary:
    """w13 -> both weights in bf16, for as long as the w13 is there: one copy for all that read it, as twice
    the bytes of the weights for each, with dequantising them, took most of the time before measuring."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


def _dequantised(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 of the shape of q, one expert at a time."""
    import torch

    wide = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    for expert, values, scales in zip(wide, q, scale, strict=True):
        expert.copy_(fp8_to_bf16(values, scales))
    return wide


class Bf16Moe(Implementation):
    """Weights dequantised before, then grouped bf16 products (torch's own kernels, W16A16)."""

    name = "torch.bf16"
    requires = "torch with grouped products (2.9 or later; sm_90 or later on cuda)"
    boundaries = ("core", "with_quant")
    shared_layout = "bf16"
    rebinds = True

    def available(self, platform: Platform) -> Support:
        return platform.library("torch")

    def layout(self, sizes: FusedMoeSizes) -> int:
        return sizes.local_experts * 3 * sizes.hidden * sizes.inter * 2

    def scratch(self, sizes: FusedMoeSizes) -> int:
        """Rows of x per pair, what experts give for them three times in bf16 and in fp32, gate, up and h;
        x in fp32; the expert that is being dequantised."""
        tokens = min(sizes.tokens, ROWS)
        pairs = tokens * sizes.picks * (sizes.hidden * (2 * 4 + 4) + sizes.inter * 2 * 6 + 64)
        return pairs + tokens * sizes.hidden * 12 + 2 * sizes.hidden * sizes.inter * 8

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return _Bf16Moe(operands, out)


class CompiledMoe(Bf16Moe):
    name = "torch.compile"
    per_size = True
    rebinds = False  # it would compile anew for each number of tokens
    requires = "torch with its compiler (a C++ compiler on cpu, Triton on cuda and rocm)"

    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.library("torch"), platform.compiler())

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def prepare_turn(self, first: _Bf16Moe | None, operands: FusedMoeOperands, out: torch.Tensor) -> Prepared:
        import torch

        prepared = _Bf16Moe(operands, out)
        prepared.function = first.function if first else torch.compile(_fused_moe, dynamic=False)
        return prepared
