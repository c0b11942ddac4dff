"""The suite's own MLA decode in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kernels.mla_decode.problem import LATENT, ROPE, MlaDecodeOperands, Sizes
from kernels.op import Prepared
from kernels.triton_runtime import SuiteTriton, Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tile:
    """What one program of the split kernel takes.

    heads:    query heads
    tokens:   cached rows per step of its loop
    resident: programs that a compute unit holds at once, by their registers and shared memory
    options:  Triton's own (warps, pipeline stages, shape of the matrix instruction)
    """

    heads: int
    tokens: int
    resident: int = 1
    options: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Tiles:
    """For ranks of few heads, and of many (attention data-parallel: 128); and where the cache is FP8."""

    few: Tile
    many: Tile
    few_fp8: Tile
    many_fp8: Tile


def _any_cache(few: Tile, many: Tile) -> Tiles:
    return Tiles(few, many, few, many)


_ROCM = {"num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": 16}

# Per platform or architecture. 16 heads are the smallest matrix instruction; 64 take wgmma on sm_90 and
# tcgen05 on sm_100, but leave no registers for widening an FP8 cache; on ROCm they give each of the four
# waves its own heads. Tokens and stages: what fits without a spill, on gfx942 into 64 KB of shared memory;
# gfx950's full rate takes 32 tokens; and what lets an NVIDIA unit hold two programs of 16 heads. From
# compiling, not yet from measuring.
TILES = {
    "cuda": Tiles(
        few=Tile(16, 32, resident=2, options={"num_warps": 4, "num_stages": 5}),
        many=Tile(64, 32, options={"num_warps": 8, "num_stages": 3}),
        few_fp8=Tile(16, 32, options={"num_warps": 8, "num_stages": 3}),
        many_fp8=Tile(32, 32, options={"num_warps": 8, "num_stages": 3}),
    ),
    "rocm": _any_cache(Tile(16, 32, options=_ROCM), Tile(64, 16, options=_ROCM)),
    "gfx950": Tiles(
        few=Tile(16, 32, resident=2, options=_ROCM),
        many=Tile(64, 32, options=_ROCM),
        few_fp8=Tile(16, 32, options=_ROCM),
        many_fp8=Tile(64, 32, options=_ROCM),
    ),
    "cpu": _any_cache(Tile(16, 128), Tile(64, 128)),
}
FEW = 32  # heads

MIN_STEPS = 4  # below that a split costs more than it brings: its partial, and a pipeline to fill
MOST_PROGRAMS = 608  # that any device holds: 304 compute units of an MI300X, two on each
CPU_PROGRAMS = 128  # of no meaning to the interpreter: enough that it sees several splits
COMBINE_VALUES = 8192  # partial values at once in a program of the combine: 64 registers per thread


def tile_for(tiles: Tiles, heads: int, fp8: bool) -> Tile:
    if fp8:
        return tiles.few_fp8 if heads <= FEW else tiles.many_fp8
    return tiles.few if heads <= FEW else tiles.many


def splits_for(tile: Tile, programs: int, batch: int, heads: int, longest: int) -> int:
    """As many splits as fill a device that holds `programs` at once, in one wave, if the longest
    sequence has enough tokens for them."""
    fill = programs // (batch * math.ceil(heads / tile.heads))
    return max(1, min(fill, longest // (MIN_STEPS * tile.tokens)))


class SplitKv(SuiteTriton):
    """Each sequence is split between programs; a second kernel combines what they found."""

    name = "triton.split_kv"
    older_instructions: ClassVar = {
        "split_kernel": "16 heads are 16 rows; 64 and an FP8 cache to widen do not fit the registers"
    }

    def workspace(self, sizes: Sizes) -> int:
        """An upper bound over all platforms: their tiles and their number of programs differ."""
        rows = sizes.batch * sizes.heads
        splits = max(
            splits_for(tile, MOST_PROGRAMS, sizes.batch, sizes.heads, max(sizes.lengths()))
            for tile in (tile_for(tiles, sizes.heads, sizes.kv == "fp8") for tiles in TILES.values())
        )
        return rows * splits * (LATENT + 1) * 4 + rows * LATENT * 4

    def prepare_for(self, target: Target, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        batch, heads = operands.q.shape[:2]
        tile = tile_for(target.choose(TILES), heads, operands.kv.element_size() == 1)
        programs = CPU_PROGRAMS if target.kind == "cpu" else target.units * tile.resident
        splits = splits_for(tile, programs, batch, heads, max(operands.host_lengths))
        return _SplitKv(operands, out, tile, splits)


class _SplitKv(Prepared):
    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor, tile: Tile, splits: int) -> None:
        import torch
        import triton
        import triton.language as tl

        from kernels.mla_decode.split_kv_jit import combine_kernel, split_kernel

        super().__init__(operands, out)
        batch, heads = operands.q.shape[:2]
        interpreted = out.device.type == "cpu"
        # The interpreter truncates where it should round to bf16: there torch rounds the output.
        self.written = torch.empty_like(out, dtype=torch.float32) if interpreted else out
        self.splits = splits
        parts = batch * heads * splits
        self.log_sums = torch.empty(parts, dtype=torch.float32, device=out.device)
        self.partial = torch.empty(parts if splits > 1 else 0, LATENT, dtype=torch.float32, device=out.device)

        self.split = split_kernel[(triton.cdiv(heads, tile.heads), batch, splits)]
        self.split_options = {
            "table_width": operands.page_table.shape[1],
            "score_scale": operands.scale * operands.kv_scale * math.log2(math.e),
            "value_scale": operands.kv_scale,
            "HEADS": heads,
            "PAGE": operands.page,
            "LATENT": LATENT,
            "ROPE": ROPE,
            "splits": splits,
            "ONE_SPLIT": splits == 1,
            "BLOCK_H": tile.heads,
            "BLOCK_N": tile.tokens,
            "PRODUCT": tl.float32 if interpreted else tl.bfloat16,
            **tile.options,
        }
        padded = triton.next_power_of_2(splits)
        columns = min(LATENT, COMBINE_VALUES // padded)
        self.combine = combine_kernel[(batch * heads, LATENT // columns)]
        self.combine_options = {
            "LATENT": LATENT,
            "splits": splits,
            "SPLITS_PADDED": padded,
            "BLOCK_D": columns,
        }

    def call(self) -> None:
        o = self.operands
        self.split(
            o.q,
            o.kv,
            o.page_table,
            o.lengths,
            self.partial,
            self.log_sums,
            self.written,
            **self.split_options,
        )
        if self.splits > 1:
            self.combine(self.partial, self.log_sums, self.written, **self.combine_options)
        if self.written is not self.out:
            self.out.copy_(self.written)
