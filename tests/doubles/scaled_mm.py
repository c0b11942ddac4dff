"""torch.nn.functional.scaled_mm with DeepSeek's block scales on sm_90: what cuBLASLt reads where.

From aten/src/ATen/native/cuda/ScaledBlas.cpp, _scaled_block1x128_block128x128 (pytorch main of 2026-08).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import ScalingType

from tests.doubles.arithmetic import BLOCK, activations, need, read, weights


class ScaledMm:
    def __init__(self, arch: str) -> None:
        self.hopper = arch == "sm_90"

    def functions(self) -> dict[str, Callable[..., Any]]:
        return {"torch.scaled_mm": self.scaled_mm}

    def scaled_mm(
        self,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_recipe_a: ScalingType,
        scale_b: torch.Tensor,
        scale_recipe_b: ScalingType,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        """a row-major, b column-major. Scales of a [M, K/128] and of b [K/128 rounded up to four, N/128],
        both with strides (1, rows)."""
        need(self.hopper, "DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90")
        recipes = (scale_recipe_a, scale_recipe_b)
        need(recipes == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128), f"{recipes}")
        (m, k), n = mat_a.shape, mat_b.shape[1]
        need(mat_b.shape[0] == k and k % 16 == 0 and n % 16 == 0, "divisible by 16")
        need(mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn, "e4m3fn")
        need(mat_a.is_contiguous() and mat_b.T.is_contiguous(), "row-major and column-major matrices")
        need(
            m % 4 == 0, "cublasLt has no kernel for an M that is no multiple of 4 (vLLM's pull request 49932)"
        )
        k_blocks, n_blocks = -(-k // BLOCK), -(-n // BLOCK)
        rows = -(-k_blocks // 4) * 4
        for scale, shape in ((scale_a, (m, k_blocks)), (scale_b, (rows, n_blocks))):
            need(scale.dtype == torch.float32 and tuple(scale.shape) == shape, f"fp32 scales of {shape}")
            need(
                scale.stride(0) == 1 and scale.stride(1) in (shape[0], shape[1] == 1),
                f"strides (1, {shape[0]})",
            )
        a = activations(mat_a, read(scale_a, m, k_blocks, strides=(1, m)))
        b = weights(mat_b.T, read(scale_b, n_blocks, k_blocks, strides=(rows, 1)))
        return (a @ b.T).to(output_dtype)
