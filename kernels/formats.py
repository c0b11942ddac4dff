"""DeepSeek's FP8 with block scales: one for each 1x128 block of activations and 128x128 block of weights.

A block's scale is its largest magnitude divided by the format's largest value, so that q * scale restores the
block. Sources: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3.2, fine-grained quantisation;
act_quant in DeepSeek-V3's inference/kernel.py; for e4m3fn the OCP 8-bit floating point specification; for
scales of powers of two ceil_to_ue8m0 in DeepGEMM's deep_gemm/utils/math.py.

Libraries differ in two points, which change bits but not accuracy. Small blocks: DeepGEMM uses an amax of at
least 1e-4, vLLM one of at least 1e-10; here the scale itself is at least 2^-126. e4m3fnuz: vLLM quantises to
224 (quantization/input_quant_fp8.py); here, as in AITER, to the format's largest value, 240.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.lazy import torch

BLOCK = 128

Scales = Literal["fp32", "ue8m0"]
"""The kinds of block scales: any fp32, or powers of two. Both are stored as fp32."""
SCALES: tuple[Scales, ...] = ("fp32", "ue8m0")

SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32, and the scale of a block of zeros: a GPU might flush a smaller one to 0."""


@dataclass(frozen=True)
class Fp8Format:
    """An FP8 format with 4 exponent bits, 3 mantissa bits and no infinities."""

    name: str
    max: float
    smallest_normal: float
    """The smallest positive value with all mantissa bits."""
    smallest_subnormal: float
    """The step between values below the smallest normal value."""

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, f"float8_{self.name}")


FORMATS = {
    f.name: f
    for f in (
        Fp8Format("e4m3fn", 448.0, 2.0**-6, 2.0**-9),
        # Its exponents are lower by one, and its only NaN is where -0 would be.
        Fp8Format("e4m3fnuz", 240.0, 2.0**-7, 2.0**-10),
    )
}


def fp8_format(name: str) -> Fp8Format:
    """The format of that name. Raises ValueError, which lists the names."""
    if name not in FORMATS:
        raise ValueError(f"unknown FP8 format {name!r}; formats: {', '.join(FORMATS)}")
    return FORMATS[name]


def native(arch: str) -> str:
    """The name of the format of an architecture's matrix instructions: e4m3fnuz on CDNA 3, else e4m3fn."""
    return "e4m3fnuz" if arch in ("gfx940", "gfx941", "gfx942") else "e4m3fn"


def native_scales(arch: str) -> str:
    """The kind of block scales that kernels of an architecture take: powers of two on Blackwell, else fp32
    (DeepGEMM 2.6.1, csrc/utils/layout.hpp; for sm_120 DeepGemmQuantScaleFMT in vLLM 0.33's
    utils/deep_gemm.py)."""
    return "ue8m0" if arch in ("sm_100", "sm_103", "sm_120") else "fp32"


def quantise_activations(
    x: torch.Tensor, fmt: Fp8Format, scales: Scales = "fp32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises x [..., K], which is bf16, fp16 or fp32 and finite. K may end in a partial block.

    scales: "fp32" for amax / max, rounded to fp32; "ue8m0" for that rounded up to a power of two

    Returns q [..., K] in fmt, which is the fp32 quotient x / scale rounded to nearest, ties to even, and the
    scales [..., ceil(K/128)] in fp32, at least 2^-126. Raises ValueError for unknown scales.
    """
    scale = block_scale(_amax(x), fmt, scales)
    copy = x.to(torch.float32, copy=True)
    # No quotient needs clamping: amax / scale exceeds max by at most two roundings of fp32, and a value less
    # than half a step above max rounds to max.
    quotient = _joined(_blocks(copy).div_(scale.unsqueeze(-1)), x.shape[-1])
    return quotient.to(fmt.dtype), scale


def dequantise_activations(
    q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns q * scale [..., K], rounded to fp32 and then to dtype, by default fp32. In fp64 it is exact.
    q: [..., K] FP8; scale: [..., ceil(K/128)] fp32"""
    import torch

    dtype = dtype or torch.float32
    wide = torch.promote_types(dtype, torch.float32)
    return _joined(_blocks(q.to(wide)).mul_(scale.to(wide).unsqueeze(-1)), q.shape[-1]).to(dtype)


def dequantise_weights(
    q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """As dequantise_activations, for q [..., N, K] and scale [..., ceil(N/128), ceil(K/128)]."""
    of_rows = scale.repeat_interleave(BLOCK, dim=-2)[..., : q.shape[-2], :]
    return dequantise_activations(q, of_rows, dtype)


def rounding_deviation(x: torch.Tensor, fmt: Fp8Format, scales: Scales = "ue8m0") -> torch.Tensor:
    """An upper estimate of the error that quantise_activations makes of each element of x: [..., K] fp32.

    Rounding to nearest errs by at most half a unit in the last place. Errors that are spread evenly over that
    range have a root mean square of half a unit / sqrt(3). With 3 mantissa bits, half a unit is at most 2^-4
    of the value, where the mantissa is 1.0. For values below the smallest normal one, it is half of the
    smallest subnormal value times the block's scale. That scale is assumed to be amax / max for "fp32", and
    twice that for "ue8m0", which is a bound for all schemes in use.
    """
    factor = 2 if known_scales(scales) == "ue8m0" else 1
    largest_scale = block_scale(_amax(x), fmt, "fp32") * factor
    of_subnormal = largest_scale * (fmt.smallest_subnormal / 12**0.5)
    of_normal = _blocks(x.float().abs().mul_(2**-4 / 3**0.5))
    return _joined(torch.maximum(of_normal, of_subnormal.unsqueeze(-1)), x.shape[-1])


def block_scale(amax: torch.Tensor, fmt: Fp8Format, scales: Scales) -> torch.Tensor:
    """The fp32 scales of blocks with these largest magnitudes, in the shape of amax."""
    import torch

    # It must be a tensor on amax's device: to divide by a number, CUDA multiplies with its inverse.
    largest = torch.full((), fmt.max, dtype=torch.float32, device=amax.device)
    scale = (amax.float() / largest).clamp_(min=SMALLEST_SCALE)
    if known_scales(scales) == "fp32":
        return scale
    # Rounds up to a power of two: a mantissa other than 0 carries into the exponent, then it is cleared.
    return ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def known_scales(scales: str) -> Scales:
    """The kind of scales of that name. Raises ValueError, which lists the names."""
    if scales not in SCALES:
        raise ValueError(f"unknown scales {scales!r}; scales: {', '.join(SCALES)}")
    return scales


def _amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each 128 of the last dimension, [..., ceil(K/128)]."""
    # Two passes over x, but no copy of it, which abs() would make.
    blocks = _blocks(x)
    return torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """Splits the last dimension into blocks [..., ceil(K/128), 128]: a view, or a copy padded with zeros."""
    missing = -x.shape[-1] % BLOCK
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.unflatten(-1, (-1, BLOCK))


def _joined(blocks: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of _blocks, contiguous."""
    return blocks.flatten(-2)[..., :k].contiguous()
