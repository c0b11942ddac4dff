"""What the double's kernels share: memory read as a kernel reads it, and products of block-scaled FP8.

Not a module of AITER. A kernel gets pointers: shapes and strides that it does not ask for are not seen, so
everything here reads raw storage, and refuses to read past its end.
"""

import torch

from .jit.utils.chip_info import get_gfx


def cdiv(a, b):
    return -(-a // b)


def fp8():
    return {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}[get_gfx()]


def raw(tensor, shape, strides):
    """The tensor's memory from its first element on, at these strides. RuntimeError past its end."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if 0 in shape or last >= held:
        raise RuntimeError(f"memory access fault: {last + 1} elements read of {held}")
    return torch.as_strided(tensor.detach(), shape, strides)


def packed(tensor, *shape):
    """The tensor's memory, read as a contiguous one of this shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    if tensor.numel() < strides[0] * shape[0]:
        raise RuntimeError(f"memory access fault: {tuple(tensor.shape)} read as {shape}")
    return raw(tensor, shape, strides)


def as_fp8(tensor, what):
    """The bytes as this GPU's FP8. The real kernels do not ask which FP8 they are given and misread the
    other."""
    if tensor.dtype == torch.uint8:
        return tensor.view(fp8())
    if tensor.dtype != fp8():
        raise RuntimeError(f"{what} is {tensor.dtype}, would be misread as {fp8()} on {get_gfx()}")
    return tensor


def unshuffle(weight):
    """[..., N, K] in the (16, 16) layout of aiter/ops/shuffle.py:192, back in rows. K: multiple of 32
    bytes."""
    *lead, n, k = weight.shape
    tiles = weight.reshape(-1, n // 16, k // 32, 2, 16, 16)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(*lead, n, k)


def rows_scaled(x, scale):
    """[M, K] fp8 with [M, ceil(K/128)] scales, as fp32."""
    return x.float() * scale.repeat_interleave(128, 1)[:, : x.shape[1]]


def tiles_scaled(w, scale):
    """[N, K] fp8 with [ceil(N/128), ceil(K/128)] scales, as fp32."""
    return (
        w.float() * scale.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
    )


def quantise(x):
    """[rows, 128 each] to fp8 and scales: csrc/kernels/quant_kernels.cu:103-147 (amax at least 1e-10, times
    1/max, and the values times 1/scale)."""
    limit = torch.finfo(fp8()).max
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-10) * (1.0 / limit)
    return (x.float() * (1.0 / scale)).clamp(-limit, limit).to(fp8()), scale.squeeze(-1)
