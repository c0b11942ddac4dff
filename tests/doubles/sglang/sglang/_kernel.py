"""What the double's kernels share: the device, and memory addressed as a kernel addresses it.

Not a module of SGLang. A Triton kernel gets pointers and the strides that its launcher passes: what the
launcher does not pass is taken for 1 here too, and nothing past the end of the storage is read.
"""

import os

import torch


def arch():
    return os.environ.get("DOUBLE_ARCH", "sm_90")


def is_hip():
    return arch().startswith("gfx")


def fp8():
    """kernels/ops/quantization/fp8_kernel.py:102: FNUZ on gfx94x, else OCP."""
    return torch.float8_e4m3fnuz if arch().startswith("gfx94") else torch.float8_e4m3fn


def fp8_max():
    """224 under FNUZ, not its own 240 (the same lines)."""
    return 224.0 if arch().startswith("gfx94") else 448.0


def cdiv(a, b):
    return -(-a // b)


def power_of_two(n):
    return n > 0 and n & (n - 1) == 0


def not_doubled(holds, what):
    if not holds:
        raise NotImplementedError(f"the double of SGLang does not cover {what}")


def addressed(tensor, what, shape, strides):
    """The tensor's memory from its first element on, at these strides."""
    if 0 in shape:
        return tensor.new_empty(shape)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if last >= held:
        raise RuntimeError(f"memory access fault: {what} is read to element {last} of {held}")
    return torch.as_strided(tensor.detach(), shape, strides)


def rows(tensor, what):
    """A tensor whose last stride the kernel takes for 1."""
    shape, strides = tensor.shape, (*tensor.stride()[:-1], 1)
    if shape[-1] > 1 and tensor.stride(-1) != 1:
        raise RuntimeError(f"{what} would be misread: its last stride is {tensor.stride(-1)}, not 1")
    return addressed(tensor, what, shape, strides)


def flat(tensor, what, count):
    """`count` integers that the kernel reads one after another."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{what} would be misread: {tensor.dtype}, not integers")
    return addressed(tensor, what, (count,), (1,)).tolist()
