"""kernels/ops/gemm/fp8_blockwise_gemm.py of SGLang 0.5.23 and what it compiles:
kernels/jit/csrc/gemm/fp8_blockwise/fp8_blockwise_scaled_mm_sm120.cuh of the wheel. SGLang passes weight.T,
the scales of sglang_per_token_group_quant_fp8_row_padded and weight_scale.T (fp8_utils.py:1426)."""

import os

import torch

FP8 = torch.float8_e4m3fn


def _check(holds: bool, what: str) -> None:
    """RuntimeCheck."""
    if not holds:
        raise RuntimeError(what)


def _at(tensor: torch.Tensor, what: str, shape: tuple[int, int], strides: tuple[int, int]) -> torch.Tensor:
    """The tensor's memory from its first element on, at these strides: the kernel is given no others."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    _check(last < held, f"memory access fault: {what} is read to element {last} of {held}")
    return torch.as_strided(tensor.detach(), shape, strides)


def fp8_blockwise_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Line 64. mat_a FP8 [M, K] row-major, mat_b FP8 [K, N] column-major, scales_a fp32 [M, K/128],
    scales_b fp32 [K/128, N/128], out_dtype bf16 or fp16. The strides of the scales are not looked at:
    scales_a is read M-major with columns of M rows, scales_b K-major. Any M goes (one that is no multiple
    of 4 runs with A and B swapped)."""
    assert out_dtype in (torch.float16, torch.bfloat16), (
        f"out_dtype must be Half or BFloat16, got {out_dtype}"
    )
    if not os.environ.get("DOUBLE_ARCH", "sm_90").startswith("sm_12"):
        raise RuntimeError("fp8_blockwise_scaled_mm JIT kernel requires SM120 (Blackwell).")
    out = torch.full((mat_a.shape[0], mat_b.shape[1]), torch.nan, dtype=out_dtype, device=mat_a.device)
    _check(mat_a.dim() == 2, "mat_a must be a 2D tensor")
    _check(mat_b.dim() == 2, "mat_b must be a 2D tensor")
    _check(mat_a.stride(1) == 1, "mat_a must be a row major tensor")
    _check(mat_b.stride(0) == 1, "mat_b must be a column major tensor")
    (m, k), n = mat_a.shape, mat_b.shape[1]
    _check(k == mat_b.shape[0], "mat_a and mat_b shapes cannot be multiplied")
    _check(k % 16 == 0, "mat_a must be multiple of 16 bytes for memory alignment")
    _check(mat_a.dtype == FP8, "mat_a must be Float8_e4m3fn")
    _check(mat_b.dtype == FP8, "mat_b must be Float8_e4m3fn")
    _check(tuple(scales_a.shape) == (m, k // 128), "size of scales_a is not matched")
    _check(tuple(scales_b.shape) == (k // 128, n // 128), "size of scales_b is not matched")
    _check(scales_a.dtype == torch.float32, "scales_a must be Float32")
    _check(scales_b.dtype == torch.float32, "scales_b must be Float32")
    _check(n * 2 % 16 == 0, "out must be multiple of 16 bytes for memory alignment")
    for name, values in (("mat_a", mat_a), ("mat_b", mat_b)):
        _check(values.data_ptr() % 16 == 0, f"{name} is aligned to 16 bytes (its tensor map)")
    if m == 0:
        return out
    # make_cute_packed_stride, and Sm120BlockwiseScaleConfig<1, 128, 128, Major::MN, Major::K>, compact
    # (cutlass/detail/blockwise_scale_layout.hpp of CUTLASS).
    groups, columns = -(-k // 128), -(-n // 128)
    left, right = _at(mat_a, "mat_a", (m, k), (k, 1)), _at(mat_b, "mat_b", (k, n), (1, k))
    rows = _at(scales_a, "scales_a", (m, groups), (1, m))
    blocks = _at(scales_b, "scales_b", (groups, columns), (1, groups))
    scaled = left.float() * rows.repeat_interleave(128, 1)[:, :k]
    weights = blocks.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    return out.copy_(scaled @ (right.float() * weights))
