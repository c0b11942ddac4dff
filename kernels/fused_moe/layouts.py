"""What rows of several libraries share: expert ids without -1, and the suite's own kernels around a library's
two products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.formats import BLOCK, SMALLEST_SCALE, fp8_format
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.fused_moe.triton.grouped import COMBINED
from kernels.op import Prepared
from kernels.triton_runtime import require_interpreter

if TYPE_CHECKING:
    import torch

WORD = 4
"""Exponents of scales in an int32, and blocks of 128 values that a program of SiLU computes."""

class ExpertIds:
    """The operands' ids, in which one more expert than the rank has stands for -1, because the library takes
    no -1: what SGLang's `forward_aiter` and vLLM's expert map give to their kernels."""

    def __init__(self, operands: FusedMoeOperands) -> None:
        import torch

        self.apart = operands.sizes.ep > 1  # whether picks lie on other ranks; else the ids stay as they are
        self.ids = torch.empty_like(operands.topk_ids) if self.apart else operands.topk_ids
        """int32 [tokens, picks]: 0 .. local_experts, the last of which stands for other ranks."""

        self.write: Callable[[], object] = lambda: None
        """Brings `ids` up to date; a part of the timed call."""
        if self.apart:
            # -1 modulo local_experts + 1 is local_experts, and no other id changes.
            self.write = lambda: torch.remainder(
                operands.topk_ids, operands.sizes.local_experts + 1, out=self.ids
            )

    def per_expert(self, values: list[int]) -> torch.Tensor | None:
        """int32 [local_experts + 1] on the device of the ids; None where no pick lies on another rank."""
        import torch

        return torch.tensor(values, dtype=torch.int32, device=self.ids.device) if self.apart else None


class BetweenProducts(Prepared):
    """The suite's own kernels around the two products of a library that leaves SiLU, requantising and the sum
    over picks to its caller."""

    operands: FusedMoeOperands

    row_of: torch.Tensor  # int32 [pairs]: the row of each pair
    gate_up: torch.Tensor  # bf16 [rows, 2 * inter]: the output of the first product
    h_q: torch.Tensor  # FP8 [rows, inter]: what the second product reads
    h_scale: torch.Tensor  # its scales, MN-major in groups of rows: fp32, or four exponents in an int32
    given: torch.Tensor  # bf16 [rows, hidden]: the output of the second product

    def __init__(self, operands: FusedMoeOperands, out: torch.Tensor) -> None:
        require_interpreter(out.device)
        super().__init__(operands, out)

    def bind(self, capacity: int, packed: bool) -> None:
        """Binds the launches, when the tensors above are there.

        capacity: rows of a group; packed: whether h_scale holds exponents
        """
        import torch
        import triton

        from kernels.fused_moe.triton import rows_jit

        sizes, out = self.operands.sizes, self.out
        # The interpreter truncates to FP8 and bf16 where it should round. There torch rounds.
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
        """The weighted sum over picks, after the products."""
        o = self.operands
        self.combine(self.given, o.topk_ids, self.row_of, o.topk_weights, self.written, **self.combining)
        if self.interpreted:
            self.out.copy_(self.written)


def activation_bytes(sizes: FusedMoeSizes) -> int:
    """x in FP8 with its scales in fp32."""
    return sizes.tokens * (sizes.hidden + sizes.hidden // BLOCK * 4)


def weight_values(sizes: FusedMoeSizes) -> int:
    """The values of w13 and w2 of all experts of the rank."""
    return sizes.local_experts * 3 * sizes.hidden * sizes.inter
