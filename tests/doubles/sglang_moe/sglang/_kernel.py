"""What the double's kernels share: the device, FP8 groups, and memory addressed as a kernel addresses it.

Not a module of SGLang. A Triton kernel gets pointers and the strides that its launcher passes: what the
launcher does not pass is taken for 1 here too, and nothing past the end of the storage is read or written.
"""

import os

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def capability():
    digits = "".join(c for c in os.environ.get("DOUBLE_ARCH", "sm_90") if c.isdigit())
    return int(digits)


def scale_ue8m0():
    """srt/layers/deep_gemm_wrapper/configurer.py DEEPGEMM_SCALE_UE8M0: sm_10x, sm_120 and sm_121."""
    return capability() // 10 in (10, 12)


def addressed(tensor, what, shape, strides):
    """The tensor's memory from its first element on, at these strides: a view."""
    if 0 in shape:
        return tensor.new_empty(shape)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if last >= held:
        raise RuntimeError(f"memory access fault: {what} is addressed to element {last} of {held}")
    return torch.as_strided(tensor.detach(), shape, strides)


def rows(tensor, what, shape):
    """A matrix whose rows are where its stride(0) says, and whose columns follow one another."""
    return addressed(tensor, what, shape, (tensor.stride(0), 1))


def integers(tensor, what, count):
    if tensor.dtype != torch.int32:
        raise RuntimeError(f"would be misread: {what} of {tensor.dtype}, not int32")
    return addressed(tensor, what, (count,), (1,)).tolist()


def inside(row, tensor, what):
    if not 0 <= row < tensor.shape[0]:
        raise RuntimeError(f"memory access fault: row {row} of {what}, which has {tensor.shape[0]}")
    return row


def poisoned(shape, dtype, device):
    """torch.empty: NaN, or bits that are no scale."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, device=device).to(dtype)
    return torch.full(shape, -1, dtype=dtype, device=device)


def quantised(values, group, ue8m0, eps=1e-10):
    """[..., K] of fp32 as FP8 and its scales [..., K / group]."""
    groups = values.unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1).clamp_min(eps) / FP8_MAX
    if ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (groups / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(-2).to(FP8), scale


def packed(scale):
    """Powers of two [..., G] as int32 [..., ceil(G / 4)]: four exponents, the first lowest."""
    *batch, groups = scale.shape
    exponents = torch.zeros(*batch, -(-groups // 4) * 4, dtype=torch.uint8, device=scale.device)
    exponents[..., :groups] = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return exponents.view(torch.int32)


def silu_and_mul(x, dtype):
    """[gate, up] of 16 bits: SiLU rounded to their type before the product."""
    gate, up = x.float().chunk(2, -1)
    return (gate / (1 + torch.exp(-gate))).to(dtype).float() * up
