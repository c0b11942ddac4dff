"""The suite's own kernels around a library's two products, where that leaves SiLU, requantising and the sum
over picks to its caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.formats import BLOCK, SMALLEST_SCALE, fp8_format
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.triton.grouped_configs import COMBINED
from kernels.op import Prepared

if TYPE_CHECKING:
    import torch

WORD = 4
"""Exponents of scales in an int32, and blocks that a program of SiLU takes."""


class BetweenProducts(Prepared):
    """row_of:  int32 [pairs]: the row of each pair
    gate_up: bf16 [rows, 2 * inter], which the first product writes
    h_q:     FP8 [rows, inter], which the second reads, with h_scale, MN-major in groups of `capacity` rows:
             fp32, or `packed` exponents, four in an int32
    given:   bf16 [rows, hidden], which it writes
    """

    operands: FusedMoeOperands
    row_of: torch.Tensor
    gate_up: torch.Tensor
    h_q: torch.Tensor
    h_scale: torch.Tensor
    given: torch.Tensor

    def bind(self, capacity: int, packed: bool) -> None:
        """Binds the launches, once the tensors are there."""
        import torch
        import triton

        from kernels.fused_moe.triton import rows_jit

        sizes, out = self.operands.sizes, self.out
        # The interpreter truncates where it should round to FP8 and to bf16: there torch rounds.
        self.interpreted = out.device.type == "cpu"
        self.h_written = torch.zeros_like(self.h_q, dtype=torch.float32) if self.interpreted else self.h_q
        self.written = torch.empty_like(out, dtype=torch.float32) if self.interpreted else out
        self.silu = rows_jit.silu_kernel[(len(self.row_of), triton.cdiv(sizes.inter, BLOCK * WORD))]
        self.activating = {
            "INTER": sizes.inter,
            "CAPACITY": capacity,
            "PACKED": packed,
            "POWER_OF_TWO": sizes.scales == "ue8m0",
            "LARGEST": fp8_format(sizes.fp8).max,
            "SMALLEST_SCALE": SMALLEST_SCALE,
            "BLOCK": BLOCK,
        }
        self.combine = rows_jit.combine_kernel[(sizes.tokens, triton.cdiv(sizes.hidden, COMBINED))]
        self.combining = {
            "HIDDEN": sizes.hidden,
            "PICKS": sizes.picks,
            "PICKS_PADDED": triton.next_power_of_2(sizes.picks),
            "BLOCK_D": COMBINED,
        }

    def activate(self) -> None:
        """SiLU and requantising, between the products."""
        ids = self.operands.topk_ids
        self.silu(self.gate_up, ids, self.row_of, self.h_written, self.h_scale, **self.activating)
        if self.interpreted:
            self.h_q.copy_(self.h_written)

    def add_up(self) -> None:
        """The sum over picks by their weights, after the products."""
        o = self.operands
        self.combine(self.given, o.topk_ids, self.row_of, o.topk_weights, self.written, **self.combining)
        if self.interpreted:
            self.out.copy_(self.written)
