"""The suite's own block-scale GEMM in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels.block_scale_gemm.layouts import column_major
from kernels.block_scale_gemm.problem import BlockScaleGemmOperands, Sizes
from kernels.formats import BLOCK, native
from kernels.op import Prepared, Unsupported
from kernels.triton_runtime import SuiteTriton, Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tile:
    """What one program computes of the output.

    m, n:     rows and columns; n divides 128, so that a program has one scale of b per step
    resident: programs that a compute unit holds at once, by their registers and shared memory
    swap:     whether it computes the tile transposed: on NVIDIA, FP8 instructions take 64 rows at least
    options:  Triton's own (warps, pipeline stages, shape of the matrix instruction)
    """

    m: int
    n: int
    resident: int = 1
    swap: bool = False
    options: Mapping[str, int] = field(default_factory=dict)


# Per platform (or architecture), for up to so many tokens. Matrix instructions on FP8, without a spill, in
# gfx942's 64 KB of shared memory. From compiling, not yet from measuring.
TILES: dict[str, dict[float, Tile]] = {
    "cuda": {
        32: Tile(16, 128, resident=2, swap=True, options={"num_warps": 4, "num_stages": 5}),
        256: Tile(64, 128, resident=2, options={"num_warps": 4, "num_stages": 4}),
        math.inf: Tile(128, 128, options={"num_warps": 8, "num_stages": 4}),
    },
    "rocm": {
        32: Tile(16, 128, resident=2, options={"num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": 16}),
        256: Tile(64, 128, resident=2, options={"num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": 16}),
        math.inf: Tile(128, 128, options={"num_warps": 8, "num_stages": 2, "matrix_instr_nonkdim": 16}),
    },
    "cpu": {64: Tile(64, 128), math.inf: Tile(1024, 128)},
}
GROUP_M = 8

MIN_STEPS = 4  # blocks of K below which a split costs more than it brings: its part, and a pipeline to fill
MOST_PROGRAMS = 608  # that any device holds: 304 compute units of an MI300X, two on each
CPU_PROGRAMS = 64  # of no meaning to the interpreter: enough that it sees several splits
SUM_VALUES = 1024  # of the output in a program of the sum

# The interpreter on one core of a Zen 4 server: a step of the loop, widening a code, numpy's fp32 products.
STEP_S = 4e-4
CODE_S = 8e-8
FLOPS = 3e10


def tile_for(tiles: Mapping[float, Tile], m: int) -> Tile:
    return next(tile for most, tile in tiles.items() if m <= most)


def splits_for(tile: Tile, programs: int, m: int, n: int, k: int) -> int:
    """As many splits as fill a device that holds `programs` at once, in one wave, if K has enough blocks
    for them; none without a block."""
    blocks = math.ceil(k / BLOCK)
    fill = programs // (math.ceil(m / tile.m) * math.ceil(n / tile.n))
    splits = max(1, min(fill, blocks // MIN_STEPS))
    return math.ceil(blocks / math.ceil(blocks / splits))


def _require_native(q: torch.Tensor, target: Target) -> None:
    """Raises Unsupported for a GPU whose matrix instructions take the other FP8 format."""
    given, taken = str(q.dtype).removeprefix("torch.float8_"), native(target.arch)
    if target.kind != "cpu" and given != taken:
        raise Unsupported(f"products of {given} need another GPU; {target.arch} takes {taken}")


class SplitK(SuiteTriton):
    """Few tokens leave few tiles: K is split between programs, and a second kernel adds up their parts."""

    name = "triton.split_k"

    def interpreted_s(self, sizes: Sizes) -> float:
        tile = tile_for(TILES["cpu"], sizes.m)
        steps = math.ceil(sizes.m / tile.m) * sizes.n_blocks * sizes.k_blocks
        step_s = STEP_S + (tile.m + tile.n) * BLOCK * CODE_S + 2 * tile.m * tile.n * BLOCK / FLOPS
        return steps * step_s

    def workspace(self, sizes: Sizes) -> int:
        """An upper bound over all platforms: their tiles and their number of programs differ."""
        splits = max(
            splits_for(tile_for(tiles, sizes.m), MOST_PROGRAMS, sizes.m, sizes.n, sizes.k)
            for tiles in TILES.values()
        )
        outputs = 1 + (splits if splits > 1 else 0)
        return sizes.quantised_bytes + 4 * sizes.m * (sizes.k_blocks + outputs * sizes.n)

    def prepare_for(self, target: Target, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        _require_native(operands.b_q, target)
        (m, k), n = operands.a_q.shape, operands.b_q.shape[0]
        tile = tile_for(target.choose(TILES), m)
        programs = CPU_PROGRAMS if target.kind == "cpu" else target.units * tile.resident
        return _SplitK(operands, out, tile, splits_for(tile, programs, m, n, k))


class _SplitK(Prepared):
    def __init__(self, operands: BlockScaleGemmOperands, out: torch.Tensor, tile: Tile, splits: int) -> None:
        import torch
        import triton
        import triton.language as tl

        from kernels.block_scale_gemm.split_k_jit import gemm_kernel, sum_kernel

        super().__init__(operands, out)
        (m, k), n = operands.a_q.shape, operands.b_q.shape[0]
        blocks = triton.cdiv(k, BLOCK)
        interpreted = out.device.type == "cpu"
        fnuz_bits = interpreted and operands.b_q.dtype == torch.float8_e4m3fnuz
        native_product = tl.float8e4b8 if operands.b_q.dtype == torch.float8_e4m3fnuz else tl.float8e4nv

        self.a_scale = column_major(operands.a_scale)
        # The interpreter truncates where it should round to bf16: there torch rounds the output.
        self.written = torch.empty_like(out, dtype=torch.float32) if interpreted else out
        self.parts = torch.empty(splits if splits > 1 else 0, m, n, dtype=torch.float32, device=out.device)
        self.splits = splits

        self.gemm = gemm_kernel[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), splits)]
        codes = torch.uint8 if fnuz_bits else operands.b_q.dtype
        self.gemm_arguments = (
            operands.a_q.view(codes),
            self.a_scale,
            operands.b_q.view(codes),
            operands.b_scale,
            self.parts if splits > 1 else self.written,
            m,
            n,
            k,
            triton.cdiv(blocks, splits),
        )
        self.gemm_options = {
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": BLOCK,
            "SCALE_N": BLOCK,
            "GROUP_M": GROUP_M,
            "EVEN_K": k % BLOCK == 0,
            "SWAP": tile.swap,
            "PRODUCT": tl.float32 if interpreted else native_product,
            "FNUZ_BITS": fnuz_bits,
            **tile.options,
        }
        self.sum = sum_kernel[(triton.cdiv(m * n, SUM_VALUES),)]
        self.sum_options = {"SPLITS": splits, "BLOCK": SUM_VALUES}

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {"a_q": self.operands.a_q, "a_scale": self.a_scale}

    def call(self) -> None:
        self.gemm(*self.gemm_arguments, **self.gemm_options)
        if self.splits > 1:
            self.sum(self.parts, self.written, self.out.numel(), **self.sum_options)
        if self.written is not self.out:
            self.out.copy_(self.written)
