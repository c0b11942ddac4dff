"""What the double's kernels share: the device, and memory addressed as a kernel addresses it.

Not a module of vLLM. What a launcher does not pass, a kernel takes for contiguous; nothing past the end of
the storage is read or written.
"""

import os

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
UNDEFINED = -(2**31)  # what an index holds that no kernel wrote


def capability():
    digits = "".join(c for c in os.environ.get("DOUBLE_ARCH", "sm_90") if c.isdigit())
    return int(digits)


def torch_check(holds, what):
    """STD_TORCH_CHECK is a RuntimeError in Python."""
    if not holds:
        raise RuntimeError(what)


def misread(holds, what):
    if not holds:
        raise RuntimeError(f"would be misread: {what}")


def not_doubled(holds, what):
    if not holds:
        raise NotImplementedError(f"the double of vLLM does not cover {what}")


def addressed(tensor, what, shape, strides):
    """The tensor's memory from its first element on, at these strides: a view."""
    if 0 in shape:
        return tensor.new_empty(shape)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if last >= held:
        raise RuntimeError(f"memory access fault: {what} is addressed to element {last} of {held}")
    return torch.as_strided(tensor.detach(), shape, strides)


def packed(tensor, what, shape):
    """A row-major tensor of that shape where this one's memory starts."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return addressed(tensor, what, shape, strides)


def rows(tensor, what, shape):
    """A matrix whose rows are where its stride(0) says, and whose columns follow one another."""
    return addressed(tensor, what, shape, (tensor.stride(0), 1))


def undefined(shape, dtype, device):
    """torch.empty: NaN, or an index that is none."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, device=device).to(dtype)
    return torch.full(shape, UNDEFINED if dtype == torch.int32 else -1, dtype=dtype, device=device)
