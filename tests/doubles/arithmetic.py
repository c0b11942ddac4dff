"""What the numeric doubles share: memory as a kernel reads it, and values with block scales."""

import torch

BLOCK = 128


def need(holds: bool, what: str) -> None:
    """The library refuses this, or would misread it without a word."""
    if not holds:
        raise RuntimeError(what)


def read(tensor: torch.Tensor, *shape: int, strides: tuple[int, ...] = ()) -> torch.Tensor:
    """The memory behind a tensor's first element, whatever shape and strides the tensor tells; contiguous
    unless strides are given. RuntimeError past its end."""
    strides = strides or torch.empty(shape, device="meta").stride()
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    need(last < held, f"memory access fault: {tuple(tensor.shape)} read as {shape} with strides {strides}")
    return tensor.as_strided(shape, strides)


def spread(scale: torch.Tensor, shape: torch.Size, per_row: bool = False) -> torch.Tensor:
    """[..., rows, columns] of that shape, of scales per block of 128 columns, and of 128 rows or of one."""
    *_, rows, columns = shape
    scale = scale if per_row else scale.repeat_interleave(BLOCK, -2)
    return scale.repeat_interleave(BLOCK, -1)[..., :rows, :columns]


def activations(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [..., M, K] of FP8 and scales per row and block."""
    return values.float() * spread(scale, values.shape, per_row=True)


def weights(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [..., N, K] of FP8 and scales per block of 128x128."""
    return values.float() * spread(scale, values.shape)


def quantised(x: torch.Tensor, fp8: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 [..., K] and fp32 scales [..., K/128]: amax / the format's maximum."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1).clamp_min(1e-10) / torch.finfo(fp8).max
    return (blocks / scale[..., None]).flatten(-2).to(fp8), scale


def rounded(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """fp32 [M, K], as FP8 with block scales has it."""
    return activations(*quantised(x, fp8))
