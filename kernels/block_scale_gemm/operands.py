"""Sizes and operands of a block-scale GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.formats import BLOCK, SCALES, Scales, fp8_format
from kernels.lazy import torch
from kernels.operands import ABSENT, Operands


@dataclass(frozen=True)
class BlockScaleGemmSizes:
    m: int  # tokens
    n: int  # output features
    k: int  # input features
    fp8: str = "e4m3fn"  # the format of a and b
    scales: str = "fp32"  # or ue8m0: powers of two, held as fp32

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            if getattr(self, name) < 1:
                raise ValueError(f"size {name}={getattr(self, name)} of block_scale_gemm must be at least 1")
        fp8_format(self.fp8)
        if self.scales not in SCALES:
            raise ValueError(f"size scales={self.scales!r} of block_scale_gemm must be {' or '.join(SCALES)}")

    @property
    def n_blocks(self) -> int:
        return -(-self.n // BLOCK)

    @property
    def k_blocks(self) -> int:
        return -(-self.k // BLOCK)

    @property
    def quantised_bytes(self) -> int:
        """The bytes of a_q and a_scale together."""
        return self.m * (self.k + 4 * self.k_blocks)


@dataclass
class BlockScaleGemmOperands(Operands):
    b_q: torch.Tensor  # FP8 [N, K]
    b_scale: torch.Tensor  # fp32 [ceil(N/128), ceil(K/128)]
    scales: Scales  # the kind of scales that a call gives a where it quantises a
    sizes: BlockScaleGemmSizes
    a_q: torch.Tensor = ABSENT  # FP8 [M, K]; core only
    a_scale: torch.Tensor = ABSENT  # fp32 [M, ceil(K/128)]; core only
    a: torch.Tensor = ABSENT  # bf16 [M, K]; with_quant only
    boundary: str = "core"

    live: ClassVar = ("a_q", "a_scale", "a")
    streamed: ClassVar = ("b_q", "b_scale")

    @property
    def m(self) -> int:
        return (self.a_q if self.a is None else self.a).shape[0]

    def narrowed(self) -> BlockScaleGemmOperands:
        if self.a is None:
            return super().narrowed()
        a_q = torch.empty_like(self.a, dtype=self.b_q.dtype)
        a_scale = torch.empty(self.m, self.sizes.k_blocks, dtype=torch.float32, device=self.a.device)
        return self.replaced(a=None, a_q=a_q, a_scale=a_scale, boundary="core")
