"""What several rows share: pairs in the order of experts, expert ids without -1, and the suite's own kernels
around a library's two products. A pair is a token and one of its picks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kernels.formats import BLOCK, SMALLEST_SCALE, fp8_format
from kernels.fp8_to_fp32 import fp8_to_bf16
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes
from kernels.lazy import torch
from kernels.op import Call, sequence

W13AndW2 = tuple["torch.Tensor", "torch.Tensor"]  # w13 and w2, or their scales, in a library's layout
WORD = 4  # blocks whose exponents fill an int32; a program of rows_jit's SiLU computes as many
CHUNK = {"cpu": 1 << 16, "cuda": 1024}  # pairs that are counted or placed at a time
THREADS = 256  # the most threads of a program of four warps

ONE_LAUNCH = 4096
"""The most pairs that each program counts by itself: four passes of a histogram in shared memory take less
time than another launch. More are divided into segments of about this many, which a first launch counts."""

MOST_SEGMENTS = 16  # each program of the second launch reads the counts of all


def most_tiles(rows: int, sizes: FusedMoeSizes) -> int:
    """The most tiles that pairs can need: each expert may leave all but one row of its last tile empty."""
    pairs = sizes.pairs
    return min(pairs, (pairs + min(sizes.local_experts, pairs) * (rows - 1)) // rows)


class Alignment:
    """A call that places the pairs in tiles of `rows` slots, each tile for one expert. It writes:

    used_tiles: the number of tiles that have an expert
    slots:      unless by_pair, the pair in each slot; in an empty slot `pairs`
    row_of:     if by_pair, the slot of each pair
    expert_of:  the expert of each tile; if by_pair, of each slot
    """

    def __init__(self, sizes: FusedMoeSizes, rows: int, ids: torch.Tensor, by_pair: bool = False) -> None:
        import triton

        from kernels.fused_moe.triton.align_jit import count_kernel, place_kernel

        pairs, experts, tiles = sizes.pairs, sizes.local_experts, most_tiles(rows, sizes)
        segments = max(1, min(MOST_SEGMENTS, -(-pairs // ONE_LAUNCH)))
        pairs_of_segment, chunk = -(-pairs // segments), chunk_for(pairs, ids.device)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=ids.device)

        self.used_tiles = empty(1)
        self.expert_of = empty(tiles * rows if by_pair else tiles)
        self.slots, self.row_of = empty(0 if by_pair else tiles * rows), empty(pairs if by_pair else 0)
        slots, row_of = (None, self.row_of) if by_pair else (self.slots, None)
        is_counted = segments > 1
        counts, grid = empty(segments if is_counted else 0, experts), (experts, segments)
        count = functools.partial(count_kernel[grid], ids, counts, pairs, pairs_of_segment, CHUNK=chunk)
        place = functools.partial(
            place_kernel[grid], ids, counts, slots, row_of, self.expert_of, self.used_tiles,
            pairs, experts, pairs_of_segment, tiles * rows, TILE=rows, CHUNK=chunk,
            EXPERTS=triton.next_power_of_2(experts), SEGMENTS=triton.next_power_of_2(segments),
            COUNTED=is_counted,
        )  # fmt: skip
        self.launches = [count, place] if is_counted else [place]

    def __call__(self) -> None:
        for launch in self.launches:
            launch()


def chunk_for(pairs: int, device: torch.device) -> int:
    """The pairs that a program counts or places at a time: a power of two, and at least the threads of a
    program, so that its histogram counts each value once."""
    most = CHUNK["cpu" if device.type == "cpu" else "cuda"]
    power_of_two = 1 << (pairs - 1).bit_length()
    return min(most, max(THREADS, power_of_two))


def expert_ids(
    operands: FusedMoeOperands, entries: list[int]
) -> tuple[torch.Tensor, Call, torch.Tensor | None]:
    """Expert ids for a library that takes no -1, but a mask or a map of all experts. All experts on other
    ranks get the id local_experts instead, as from SGLang's `forward_aiter` and vLLM's expert map.

    entries: what the mask or map holds for the ids 0 to local_experts

    Returns the ids, int32 [tokens, picks]; the part of the timed call that writes them; and the mask or map,
    int32 [local_experts + 1], or None where all experts are on this rank.
    """
    import torch

    topk_ids, sizes = operands.topk_ids, operands.sizes
    if sizes.ep == 1:
        return topk_ids, lambda: None, None
    ids = torch.empty_like(topk_ids)
    mask_or_map = torch.tensor(entries, dtype=torch.int32, device=topk_ids.device)
    # -1 modulo local_experts + 1 is local_experts, and no other id changes.
    return ids, lambda: torch.remainder(topk_ids, sizes.local_experts + 1, out=ids), mask_or_map


def requantising(sizes: FusedMoeSizes) -> dict[str, Any]:
    """The constants of a Triton kernel that quantises h, by their names there."""
    return {
        "LARGEST": fp8_format(sizes.fp8).max, "SMALLEST_SCALE": SMALLEST_SCALE,
        "POWER_OF_TWO": sizes.scales == "ue8m0", "BLOCK": BLOCK,
    }  # fmt: skip


def combination(
    operands: FusedMoeOperands,
    expert_out: torch.Tensor,
    row_of: torch.Tensor | None,
    out: torch.Tensor,
    columns: int = 1024,
) -> Call:
    """The launch that writes to `out` the weighted sum of each token's rows of `expert_out`. row_of: as
    `combine_kernel` has it; columns: columns that a program computes"""
    import triton

    from kernels.fused_moe.triton.rows_jit import combine_kernel

    hidden, picks = operands.sizes.hidden, operands.sizes.picks
    return functools.partial(
        combine_kernel[(operands.sizes.tokens, triton.cdiv(hidden, columns))],
        expert_out, operands.topk_ids, row_of, operands.topk_weights, out,
        HIDDEN=hidden, PICKS=picks, PICKS_PADDED=triton.next_power_of_2(picks), BLOCK_D=columns,
    )  # fmt: skip


def scale_columns(k: int, packed: bool) -> int:
    """The number of scales of K values in a row, or of int32 words where scales are packed."""
    return -(-k // (BLOCK * WORD if packed else BLOCK))


def scale_rows(groups: int, rows: int, k: int, packed: bool, device: torch.device) -> torch.Tensor:
    """Empty scales of activations [groups, rows, columns]: fp32, or packed, four exponents in an int32. The
    scales of adjacent rows are adjacent in memory, as TMA reads them. Where the rows are a multiple of 4,
    columns begin at multiples of 16 bytes."""
    dtype = torch.int32 if packed else torch.float32
    columns = scale_columns(k, packed)
    return torch.empty(groups, columns, rows, dtype=dtype, device=device).transpose(1, 2)


class AroundProducts:
    """The suite's own kernels for a library that has only the two products: `activate` is SiLU with
    requantising, between the products, and `add_up` the weighted sum over picks, after them."""

    def __init__(
        self, operands: FusedMoeOperands, out: torch.Tensor, row_of: torch.Tensor,
        groups: int, rows: int, packed: bool = False,
    ) -> None:  # fmt: skip
        """row_of: int32 [pairs]: the row of each pair, counted through all groups of `rows` rows
        packed: whether the library takes the scales of h packed"""
        from kernels.fused_moe.triton.rows_jit import silu_kernel

        sizes = operands.sizes
        # The outputs of the products, in bf16.
        self.gate_up = out.new_empty(groups, rows, 2 * sizes.inter)
        self.expert_out = out.new_empty(groups, rows, sizes.hidden)
        # What the second product reads: FP8, and its scales as `scale_rows` has them.
        self.h_q = out.new_empty(groups, rows, sizes.inter, dtype=operands.w13.dtype)
        self.h_scale = scale_rows(groups, rows, sizes.inter, packed, out.device)
        # The interpreter truncates to FP8 and bf16 where it should round. There torch rounds.
        interpreted = out.device.type == "cpu"
        h_written = torch.zeros_like(self.h_q, dtype=torch.float32) if interpreted else self.h_q
        written = torch.empty_like(out, dtype=torch.float32) if interpreted else out
        self.activate: Call = functools.partial(
            silu_kernel[(len(row_of), -(-sizes.inter // (BLOCK * WORD)))],
            *(self.gate_up, operands.topk_ids, row_of, h_written, self.h_scale),
            **requantising(sizes), INTER=sizes.inter, CAPACITY=rows, PACKED=packed,
        )  # fmt: skip
        self.add_up: Call = combination(operands, self.expert_out, row_of, written)
        if interpreted:
            self.activate = sequence(self.activate, functools.partial(self.h_q.copy_, h_written))
            self.add_up = sequence(self.add_up, functools.partial(out.copy_, written))


def weights_in_bf16(
    operands: FusedMoeOperands, pack: Callable[[torch.Tensor], torch.Tensor] = lambda weights: weights
) -> W13AndW2:
    """w13 and w2 dequantised to bf16 [local, N, K]. pack: reorders the weights of one expert, [1, N, K]. It
    is called for one expert after another, so that memory never holds all of them twice."""

    def dequantised(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        all_experts = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
        for expert, values, scales in zip(all_experts, q, scale, strict=True):
            expert.copy_(pack(fp8_to_bf16(values, scales)[None])[0])
        return all_experts

    w13, w2 = operands.w13, operands.w2
    return dequantised(w13, operands.w13_scale), dequantised(w2, operands.w2_scale)
