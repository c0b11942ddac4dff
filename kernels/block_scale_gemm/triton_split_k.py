"""The suite's own block-scale GEMM in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.block_scale_gemm.layouts import column_major
from kernels.block_scale_gemm.problem import BlockScaleGemmOperands, Sizes
from kernels.formats import BLOCK, native
from kernels.op import Unsupported
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Demand, Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Config:
    """What one program computes, and how many there are.

    rows, columns: of the output; columns divide 128, so that a program has one scale of b per step
    swap:          whether it computes the tile transposed: on NVIDIA, FP8 instructions take 64 rows at least
    per_unit:      programs that the splits of K are to give each compute unit
    warps, stages: Triton's; instruction: rows of AMD's matrix instruction, 0 elsewhere
    """

    rows: int
    columns: int
    swap: bool = False
    per_unit: int = 1
    warps: int = 4
    stages: int = 2
    instruction: int = 0


# Matrix instructions on FP8, without a spill, in gfx942's 64 KB of shared memory. By compiling.
HEURISTIC: dict[str, dict[float, Config]] = {
    "cuda": {
        32: Config(16, 128, swap=True, per_unit=2, warps=4, stages=5),
        256: Config(64, 128, per_unit=2, warps=4, stages=4),
        math.inf: Config(128, 128, warps=8, stages=4),
    },
    "rocm": {
        32: Config(16, 128, per_unit=2, warps=4, stages=2, instruction=16),
        256: Config(64, 128, per_unit=2, warps=4, stages=2, instruction=16),
        math.inf: Config(128, 128, warps=8, stages=2, instruction=16),
    },
    "cpu": {64: Config(64, 128), math.inf: Config(1024, 128)},
}
GROUP_M = 8

MIN_STEPS = 4  # blocks of K below which a split costs more than it brings: its part, and a pipeline to fill
MOST_PROGRAMS = 1216  # that splits make on any device: 304 compute units of an MI300X, four on each
SUM_VALUES = 1024  # of the output in a program of the sum

# The interpreter on one core of a Zen 4 server: a step of the loop, widening a code, numpy's fp32 products.
STEP_S = 4e-4
CODE_S = 8e-8
FLOPS = 3e10


def splits_for(config: Config, units: int, m: int, n: int, k: int) -> int:
    """As many splits as give each compute unit the programs asked for, if K has enough blocks for them; none
    without a block."""
    blocks = math.ceil(k / BLOCK)
    tiles = math.ceil(m / config.rows) * math.ceil(n / config.columns)
    splits = max(1, min(units * config.per_unit // tiles, blocks // MIN_STEPS))
    return math.ceil(blocks / math.ceil(blocks / splits))


def _require_native(q: torch.Tensor, target: Target) -> None:
    """Raises Unsupported for a GPU whose matrix instructions take the other FP8 format."""
    given, taken = str(q.dtype).removeprefix("torch.float8_"), native(target.arch)
    if target.kind != "cpu" and given != taken:
        raise Unsupported(f"products of {given} need another GPU; {target.arch} takes {taken}")


class SplitK(SuiteTriton):
    """Few tokens leave few tiles: K is split between programs, and a second kernel adds up their parts."""

    name = "triton.split_k"
    Config = Config

    def configurations(self, target: Target, sizes: Sizes) -> Iterator[Config]:
        """Tiles of at most twice the rows that there are. A program waits for what all of its stages read."""
        rows = [r for r in (16, 32, 64, 128) if r < 2 * max(16, sizes.m)]
        columns = (64, 128)
        for m, n, warps, per_unit in itertools.product(rows, columns, (4, 8), (1, 2, 4)):
            if target.kind == "rocm":
                for stages, instruction in itertools.product((1, 2, 3), (16, 32)):
                    if m >= instruction:
                        yield Config(m, n, False, per_unit, warps, stages, instruction)
            else:
                for stages in (2, 3, 4, 5, 6):
                    yield Config(m, n, m < 64, per_unit, warps, stages)

    def heuristic(self, target: Target, sizes: Sizes) -> Config:
        return next(config for most, config in target.pick(HEURISTIC).items() if sizes.m <= most)

    def demands(self, config: Config, target: Target, sizes: Sizes) -> list[Demand]:
        splits = splits_for(config, target.units, sizes.m, sizes.n, sizes.k)
        blocks = math.ceil(sizes.k_blocks / splits)
        tiles = math.ceil(sizes.m / config.rows) * math.ceil(sizes.n / config.columns)
        step = (config.rows + config.columns) * BLOCK
        parts = 4 * sizes.m * sizes.n * splits if splits > 1 else 2 * sizes.m * sizes.n
        gemm = Demand(
            kernel="gemm_kernel",
            programs=tiles * splits,
            flops=2.0 * config.rows * config.columns * BLOCK * blocks,
            dtype="fp8",
            read=step * blocks,
            in_flight=step * max(1, config.stages - 1),
            moved=sizes.m * sizes.k + sizes.n * sizes.k + parts,
        )
        if splits == 1:
            return [gemm]
        read = 4.0 * SUM_VALUES * splits
        moved = (4.0 * splits + 2) * sizes.m * sizes.n
        programs = math.ceil(sizes.m * sizes.n / SUM_VALUES)
        return [gemm, Demand("sum_kernel", programs, 0, "fp32", read, read, moved)]

    def interpreted_s(self, sizes: Sizes) -> float:
        tile = self.heuristic(CPU, sizes)
        steps = math.ceil(sizes.m / tile.rows) * sizes.n_blocks * sizes.k_blocks
        step_s = (
            STEP_S
            + (tile.rows + tile.columns) * BLOCK * CODE_S
            + 2 * tile.rows * tile.columns * BLOCK / FLOPS
        )
        return steps * step_s

    def workspace(self, sizes: Sizes) -> int:
        """An upper bound over all platforms and configurations."""
        blocks = sizes.k_blocks
        splits = max(1, min(MOST_PROGRAMS // math.ceil(sizes.n / BLOCK), blocks // MIN_STEPS))
        outputs = 1 + (splits if splits > 1 else 0)
        return sizes.quantised_bytes + 4 * sizes.m * (sizes.k_blocks + outputs * sizes.n)

    def prepare_with(
        self, config: Config, target: Target, operands: BlockScaleGemmOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        _require_native(operands.b_q, target)
        (m, k), n = operands.a_q.shape, operands.b_q.shape[0]
        return _SplitK(operands, out, config, splits_for(config, target.units, m, n, k))


class _SplitK(ConfiguredPrepared):
    def __init__(
        self, operands: BlockScaleGemmOperands, out: torch.Tensor, config: Config, splits: int
    ) -> None:
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

        self.gemm = gemm_kernel[(triton.cdiv(m, config.rows) * triton.cdiv(n, config.columns), splits)]
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
            "BLOCK_M": config.rows,
            "BLOCK_N": config.columns,
            "BLOCK_K": BLOCK,
            "SCALE_N": BLOCK,
            "GROUP_M": GROUP_M,
            "EVEN_K": k % BLOCK == 0,
            "SWAP": config.swap,
            "PRODUCT": tl.float32 if interpreted else native_product,
            "FNUZ_BITS": fnuz_bits,
            **options(config.warps, config.stages, config.instruction),
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
