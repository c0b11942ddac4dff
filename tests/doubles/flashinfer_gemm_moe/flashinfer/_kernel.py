"""How the C++ side fails and reads: pointers, not strides; what it would misread unseen is refused here."""

import torch

FP8 = torch.float8_e4m3fn


def icheck(holds: bool, what: str) -> None:
    """TVM_FFI_ICHECK and FLASHINFER_CHECK reach Python as a RuntimeError."""
    if not holds:
        raise RuntimeError(f"Check failed: {what}")


def unseen(holds: bool, what: str) -> None:
    """The library does not look, and would compute garbage."""
    if not holds:
        raise RuntimeError(f"the library would misread this without a word: {what}")


def not_doubled(holds: bool, what: str) -> None:
    if not holds:
        raise NotImplementedError(f"the double of flashinfer does not cover {what}")


def dense(t: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """Read by its data pointer as contiguous, through a tensor map (16 bytes)."""
    unseen(t.dtype == dtype, f"{name} is {t.dtype}, read as {dtype}")
    unseen(t.is_contiguous(), f"{name} is read as contiguous, its strides are {t.stride()}")
    icheck(t.data_ptr() % 16 == 0, f"{name} is aligned to 16 bytes")


def raw(t: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], name: str) -> torch.Tensor:
    """A view of the fp32 at a tensor's data pointer, whatever the tensor's own shape and strides are."""
    unseen(t.dtype == torch.float32, f"{name} is {t.dtype}, read as float32")
    last = t.storage_offset() + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    icheck(last < t.untyped_storage().nbytes() // 4, f"CUDA error: an illegal memory access ({name})")
    return t.as_strided(shape, strides)


def packed(t: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """`raw` with the strides of a contiguous tensor of that shape."""
    return raw(t, shape, torch.empty(shape, device="meta").stride(), name)


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def expand(scale: torch.Tensor, rows: int, columns: int, gran: tuple[int, int]) -> torch.Tensor:
    """[..., rows, columns] of a scale per gran block."""
    return scale.repeat_interleave(gran[0], -2).repeat_interleave(gran[1], -1)[..., :rows, :columns]


def quantised(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x rounded to FP8 with a scale per (rows, 128) block, as fp32: scale_1x128_kernel and
    scale_128x128_kernel of fp8_blockscale_gemm_kernel.cuh (448 / amax, or 1 where all is zero)."""
    m, k = x.shape
    whole = torch.zeros(ceil_div(m, rows) * rows, ceil_div(k, 128) * 128, device=x.device)
    whole[:m, :k] = x.float()
    blocks = whole.view(whole.shape[0] // rows, rows, whole.shape[1] // 128, 128)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scale = torch.where(amax == 0, 1.0, 448.0 / amax)
    return ((blocks * scale).to(FP8).float() / scale).view_as(whole)[:m, :k]
