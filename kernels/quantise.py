"""The suite's own kernel that quantises activations: what a boundary `with_quant` adds to a kernel that
takes quantised operands."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.formats import BLOCK, SCALES, SMALLEST_SCALE, Fp8Format, Scales, block_scale, fp8_format

if TYPE_CHECKING:
    import torch

ROWS = 16  # of a program: 2048 values, 16 for each thread of four warps
INTERPRETED_ROWS = 1024  # the interpreter's time is per program

# Of torch's scratch: 128 rows of 7168 values are 3.7 MB, which stay in cache from step to step.
CPU_ROWS = 128


def quantiser(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, scales: Scales = "fp32"
) -> Callable[[], None]:
    """A callable that quantises what x holds into q and scale, bit by bit as quantise_activations does.

    x:     bf16 [M, K], finite
    q:     [M, K] in one of kernels.formats.FORMATS; on a GPU one that it converts to (kernels.formats.native)
    scale: fp32 [M, ceil(K/128)]
    All of any strides, on one device. A Triton kernel, on a CPU too where TRITON_INTERPRET=1; otherwise
    torch's operators there, some rows at a time. Raises ValueError for shapes that do not fit, a q that is
    not in one of these formats, or unknown scales.
    """
    fmt = fp8_format(str(q.dtype).removeprefix("torch.float8_"))
    blocks = -(-x.shape[1] // BLOCK)
    if q.shape != x.shape or scale.shape != (x.shape[0], blocks):
        given = ", ".join(f"{name} {list(t.shape)}" for name, t in {"x": x, "q": q, "scale": scale}.items())
        raise ValueError(f"shapes do not fit: {given}; wanted [M, K], [M, K] and [M, ceil(K/{BLOCK})]")
    if scales not in SCALES:
        raise ValueError(f"unknown scales {scales!r}; scales: {', '.join(SCALES)}")
    if x.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return _triton(x, q, scale, fmt, scales)
    return _torch(x, q, scale, fmt, scales)


def _triton(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, scales: Scales
) -> Callable[[], None]:
    import torch

    from kernels.quantise_jit import quantise_kernel

    interpreted = x.device.type == "cpu"
    rows = INTERPRETED_ROWS if interpreted else ROWS
    # The interpreter reads subnormal bf16 wrongly, and truncates to FP8 where it should round: there torch
    # converts both.
    read, written = (torch.empty(x.shape), torch.empty(x.shape)) if interpreted else (x, q)
    launch = quantise_kernel[(-(-x.shape[0] // rows), scale.shape[1])]
    arguments = (read, written, scale, *x.shape, *read.stride(), *written.stride(), *scale.stride())
    constants = {
        "LARGEST": fmt.max,
        "SMALLEST_SCALE": SMALLEST_SCALE,
        "POWER_OF_TWO": scales == "ue8m0",
        "BLOCK": BLOCK,
        "BLOCK_M": rows,
    }

    def quantise() -> None:
        if interpreted:
            read.copy_(x)
        launch(*arguments, **constants)
        if interpreted:
            q.copy_(written)

    return quantise


def _torch(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, scales: Scales
) -> Callable[[], None]:
    import torch

    columns = x.shape[1]
    rows = min(CPU_ROWS, x.shape[0])
    # Zeros past K's end stay: they change no amax, and divided they are zeros.
    wide = torch.zeros(rows, scale.shape[1], BLOCK)
    largest, smallest = torch.empty(rows, scale.shape[1]), torch.empty(rows, scale.shape[1])
    parts = [
        (x_part, q_part, scale_part, wide[:n], wide.flatten(1)[:n, :columns], largest[:n], smallest[:n])
        for x_part, q_part, scale_part in zip(x.split(rows), q.split(rows), scale.split(rows), strict=True)
        for n in [len(x_part)]
    ]

    def quantise() -> None:
        for x_part, q_part, scale_part, blocks, values, high, low in parts:
            values.copy_(x_part)
            torch.amax(blocks, -1, out=high)
            torch.amin(blocks, -1, out=low)
            torch.maximum(high, low.neg_(), out=high)
            step = block_scale(high, fmt, scales)
            scale_part.copy_(step)
            blocks.div_(step.unsqueeze(-1))
            q_part.copy_(values)

    return quantise
