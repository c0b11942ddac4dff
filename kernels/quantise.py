"""The suite's own kernel that quantises activations, for kernels of quantised operands in `with_quant`."""

from __future__ import annotations

import os
from collections.abc import Callable

from kernels.formats import BLOCK, SMALLEST_SCALE, Fp8Format, Scales, block_scale, fp8_format, known_scales
from kernels.lazy import torch

ROWS = 16
"""Rows of a Triton program: 2048 values, 16 for each thread of four warps."""
INTERPRETED_ROWS = 1024
"""Rows of a program in the interpreter, whose time depends on the number of programs."""

CPU_ROWS = 128
"""Rows that torch quantises at once: with 7168 columns they take 3.7 MB, which stay in cache."""


def quantiser(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, scales: Scales = "fp32"
) -> Callable[[], None]:
    """Returns a function that quantises x, as it then is, into q and scale, like quantise_activations.

    x:      bf16 [M, K], finite
    q:      [M, K] in one of kernels.formats.FORMATS; on a GPU, one that the GPU can convert to
    scale:  fp32 [M, ceil(K/128)]
    scales: the kind of scales, as in quantise_activations

    All three may have any strides, and are on one device. On a GPU, and on a CPU with TRITON_INTERPRET=1, a
    Triton kernel computes; otherwise torch's operators do. Raises ValueError for shapes that do not fit, for
    a q in another format, and for unknown scales.
    """
    fmt = fp8_format(str(q.dtype).removeprefix("torch.float8_"))
    blocks = -(-x.shape[1] // BLOCK)
    if q.shape != x.shape or scale.shape != (x.shape[0], blocks):
        given = f"x {list(x.shape)}, q {list(q.shape)}, scale {list(scale.shape)}"
        raise ValueError(f"shapes do not fit: {given}; wanted [M, K], [M, K] and [M, ceil(K/{BLOCK})]")
    known_scales(scales)
    if x.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return _triton(x, q, scale, fmt, scales)
    return _torch(x, q, scale, fmt, scales)


def _triton(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, scales: Scales
) -> Callable[[], None]:
    from kernels.quantise_jit import quantise_kernel

    interpreted = x.device.type == "cpu"
    rows = INTERPRETED_ROWS if interpreted else ROWS
    # The interpreter converts bf16 and FP8 wrongly. So the kernel gets fp32 tensors, and torch converts.
    source, target = (torch.empty(x.shape), torch.empty(x.shape)) if interpreted else (x, q)
    row_blocks, column_blocks = -(-x.shape[0] // rows), scale.shape[1]
    launch = quantise_kernel[row_blocks, column_blocks]
    arguments = (source, target, scale, *x.shape, *source.stride(), *target.stride(), *scale.stride())
    constants = {
        "LARGEST": fmt.max,
        "SMALLEST_SCALE": SMALLEST_SCALE,
        "POWER_OF_TWO": scales == "ue8m0",
        "BLOCK": BLOCK,
        "BLOCK_M": rows,
    }

    def quantise() -> None:
        if interpreted:
            source.copy_(x)
        launch(*arguments, **constants)
        if interpreted:
            q.copy_(target)

    return quantise


def _torch(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, scales: Scales
) -> Callable[[], None]:
    import torch

    columns = x.shape[1]
    rows = min(CPU_ROWS, x.shape[0])
    # Some rows at a time, in fp32 and in whole blocks. The zeros behind K stay, and change no amax.
    wide = torch.zeros(rows, scale.shape[1], BLOCK)
    largest, smallest = torch.empty(rows, scale.shape[1]), torch.empty(rows, scale.shape[1])
    parts = list(zip(x.split(rows), q.split(rows), scale.split(rows), strict=True))

    def quantise() -> None:
        for x_part, q_part, scale_part in parts:
            count = len(x_part)  # the last part may have fewer rows
            blocks, high, low = wide[:count], largest[:count], smallest[:count]
            values = wide.flatten(1)[:count, :columns]  # the same memory as `blocks`
            values.copy_(x_part)
            torch.amax(blocks, -1, out=high)
            torch.amin(blocks, -1, out=low)
            torch.maximum(high, low.neg_(), out=high)
            block_scales = block_scale(high, fmt, scales)
            scale_part.copy_(block_scales)
            blocks.div_(block_scales.unsqueeze(-1))
            q_part.copy_(values)

    return quantise
