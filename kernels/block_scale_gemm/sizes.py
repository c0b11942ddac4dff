"""Sizes of a block-scale GEMM."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.formats import BLOCK, SCALES, fp8_format


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
