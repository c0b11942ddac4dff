"""The suite's own block-scale GEMM in Triton: one source for CUDA and ROCm, interpreted on a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kernels.block_scale_gemm.layouts import column_major
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.block_scale_gemm.triton import split_k_configs
from kernels.block_scale_gemm.triton.split_k_configs import SplitKConfig
from kernels.formats import BLOCK, native
from kernels.op import Unsupported
from kernels.triton_runtime import CPU, ConfiguredPrepared, SuiteTriton, options
from kernels.tuning import Demand, Target

if TYPE_CHECKING:
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

DIES = {"gfx942": 8, "gfx950": 8}
"""Accelerator dies of an MI300X and an MI355X, each with its own L2; programs are dealt to them in turn."""

# The interpreter on one core of a Zen 4 server: a step of the loop, widening a code, numpy's fp32 products.
STEP_S = 4e-4
CODE_S = 8e-8
FLOPS = 3e10


def _require_native(q: torch.Tensor, target: Target) -> None:
    """Raises Unsupported for a GPU whose matrix instructions take the other FP8 format."""
    given, taken = str(q.dtype).removeprefix("torch.float8_"), native(target.arch)
    if target.kind != "cpu" and given != taken:
        raise Unsupported(f"products of {given} need another GPU; {target.arch} takes {taken}")


class SplitK(SuiteTriton):
    """Few tokens leave few tiles: K is split between programs, and the last of a tile or a second kernel adds
    up their parts."""

    name = "triton.split_k"
    Config = SplitKConfig

    def configurations(self, target: Target, sizes: BlockScaleGemmSizes) -> Iterator[SplitKConfig]:
        return split_k_configs.configurations(target, sizes)

    def heuristic(self, target: Target, sizes: BlockScaleGemmSizes) -> SplitKConfig:
        return split_k_configs.heuristic(target, sizes)

    def demands(self, config: SplitKConfig, target: Target, sizes: BlockScaleGemmSizes) -> list[Demand]:
        return split_k_configs.demands(config, target, sizes)

    def interpreted_s(self, sizes: BlockScaleGemmSizes) -> float:
        tile = self.heuristic(CPU, sizes)
        steps = math.ceil(sizes.m / tile.rows) * sizes.n_blocks * sizes.k_blocks
        step_s = (
            STEP_S
            + (tile.rows + tile.columns) * BLOCK * CODE_S
            + 2 * tile.rows * tile.columns * BLOCK / FLOPS
        )
        return steps * step_s

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        """An upper bound over all platforms and configurations: activation scales in this kernel's layout,
        parts and counters."""
        values = sizes.m * sizes.n
        parts = min(values * sizes.k_blocks // split_k_configs.MIN_STEPS, split_k_configs.MOST_PARTS)
        counters = math.ceil(sizes.m / 16) * math.ceil(sizes.n / 32)  # of the smallest tiles
        return 4 * (sizes.m * sizes.k_blocks + parts + counters)

    def prepare_with(
        self, config: SplitKConfig, target: Target, operands: BlockScaleGemmOperands, out: torch.Tensor
    ) -> ConfiguredPrepared:
        _require_native(operands.b_q, target)
        return _SplitK(operands, out, config, target)


class _SplitK(ConfiguredPrepared):
    operands: BlockScaleGemmOperands

    def __init__(
        self, operands: BlockScaleGemmOperands, out: torch.Tensor, config: SplitKConfig, target: Target
    ) -> None:
        import torch
        import triton
        import triton.language as tl

        from kernels.block_scale_gemm.triton.split_k_jit import gemm_kernel, sum_kernel

        super().__init__(operands, out)
        (m, k), n, sizes = operands.a_q.shape, operands.b_q.shape[0], operands.sizes
        splits = config.splits(target, sizes)
        interpreted = out.device.type == "cpu"
        fnuz_bits = interpreted and operands.b_q.dtype == torch.float8_e4m3fnuz
        native_product = tl.float8e4b8 if operands.b_q.dtype == torch.float8_e4m3fnuz else tl.float8e4nv

        self.a_scale = column_major(operands.a_scale)
        # The interpreter truncates where it should round to bf16: there torch rounds the output.
        self.written = torch.empty_like(out, dtype=torch.float32) if interpreted else out
        sums = config.sums if splits > 1 else "whole"
        self.parts = out.new_empty(splits if splits > 1 else 0, m, n, dtype=torch.float32)
        self.arrived = out.new_zeros(config.tiles(sizes) if sums == "last" else 0, dtype=torch.int32)

        codes = torch.uint8 if fnuz_bits else operands.b_q.dtype
        a, b = operands.a_q.view(codes), operands.b_q.view(codes)
        if config.tma:
            a, b = _described(a, config.rows // (1 + config.halves)), _described(b, config.columns)
        self.gemm = gemm_kernel[(config.programs(target, sizes),)]
        self.gemm_arguments = (
            a,
            self.a_scale,
            b,
            operands.b_scale,
            self.written,
            self.parts,
            self.arrived,
            m,
            n,
            k,
            splits,
            triton.cdiv(sizes.k_blocks, splits),
        )
        self.gemm_options = {
            "BLOCK_M": config.rows,
            "BLOCK_N": config.columns,
            "DIES": DIES.get(target.arch, 1),
            "SUMS": sums,
            "HALVES": config.halves,
            "PERSISTENT": config.persistent,
            "TMA": config.tma,
            "EVEN_K": config.tma or k % BLOCK == 0,
            "SWAP": config.swap,
            "PRODUCT": tl.float32 if interpreted else native_product,
            "FNUZ_BITS": fnuz_bits,
            **_options(config, target),
        }
        self.sum = sum_kernel[(triton.cdiv(m * n, split_k_configs.SUM_VALUES),)] if sums == "later" else None
        self.sum_arguments = (self.parts, self.written, m * n, splits)

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {"a_q": self.operands.a_q, "a_scale": self.a_scale}

    def call(self) -> None:
        self.gemm(*self.gemm_arguments, **self.gemm_options)
        if self.sum:
            self.sum(*self.sum_arguments, VALUES=split_k_configs.SUM_VALUES)
        if self.written is not self.out:
            self.out.copy_(self.written)


def _described(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x [..., K] for loads of [rows, 128]. A call hands the descriptor over by value."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, [rows, BLOCK])


def _options(config: SplitKConfig, target: Target) -> dict[str, int]:
    """AMD's instructions of 16 rows, as in all of AITER's tuned tables for this op: as fast as those of 32,
    and no tile is too small. On gfx942 two of them take one read of shared memory. Large tiles
    are kept to the registers that two waves of a SIMD can have."""
    if target.kind != "rocm":
        return options(config.warps, config.stages)
    heavy = config.warps >= 4 and config.rows * config.columns >= 64 * 64 * config.warps
    return (
        options(config.warps, config.stages, instruction=16)
        | ({"kpack": 2} if target.arch == "gfx942" else {})
        | ({"waves_per_eu": 2} if heavy else {})
    )
