"""Sizes of a block-scale GEMM."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.formats import BLOCK, SCALES, fp8_format


@dataclass(frozen=True)
class BlockScaleGemmSizes:
    """m: tokens; n: output features; k: input features; fp8: format of a and b; scales: fp32, or ue8m0
    (powers of two, held as fp32)."""

    m: int
    n: int
    k: int
    fp8: str = "e4m3fn"
    scales: str = "fp32"

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
        """Of a_q and a_scale: what composing `with_quant` out of a core call allocates."""
        return self.m * (self.k + 4 * self.k_blocks)
