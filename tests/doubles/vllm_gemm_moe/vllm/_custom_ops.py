"""vllm/_custom_ops.py of vLLM 0.33.0, and what it calls: csrc/libtorch_stable/quantization/w8a8/cutlass, read
at commits 0601812 (scaled_mm_entry.cu), 1177ca9 (c3x/scaled_mm_helper.hpp), 1051220
(c3x/scaled_mm_blockwise_sm90_fp8_dispatch.cuh and ..._sm120_...) and 0f17ee0 (..._sm100_...)."""

import torch

from ._kernel import FP8, addressed, capability, misread, not_doubled, packed, torch_check


def cutlass_scaled_mm_supports_fp8(cuda_device_capability: int) -> bool:
    """scaled_mm_entry.cu, compiled with CUDA 12.8 or newer."""
    return cuda_device_capability >= 89


def cutlass_scaled_mm_supports_block_fp8(cuda_device_capability: int) -> bool:
    """scaled_mm_entry.cu, compiled with CUDA 12.8 or newer."""
    return cuda_device_capability >= 90


def cutlass_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Line 784, with block scales only: a FP8 [..., K] row-major, b FP8 [K, N] column-major, scale_a fp32
    [M, K/128], scale_b fp32 [K/128, N/128]. The kernels ignore the strides of the scales: scale_a is read
    M-major with M rows to a column, scale_b K-major. vLLM passes weight.T and weight_scale.T
    (model_executor/kernels/linear/scaled_mm/cutlass.py:311)."""
    assert out_dtype is torch.bfloat16 or out_dtype is torch.float16
    assert bias is None or (bias.numel() == b.shape[1] and bias.dtype == out_dtype)
    target_shape = (*a.shape[:-1], b.shape[1])
    a = a.view(-1, a.shape[-1])
    compatible = b.shape[0] % 16 == 0 and b.shape[1] % 16 == 0
    not_doubled(compatible, "triton_scaled_mm, for a K or an N that is no multiple of 16")
    out = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=out_dtype, device=a.device)
    _op(out, a, b, scale_a, scale_b, bias)
    return out.view(*target_shape)


def _op(c, a, b, a_scales, b_scales, bias) -> None:
    """scaled_mm_entry.cu cutlass_scaled_mm, then scaled_mm_helper.hpp dispatch_scaled_mm."""
    torch_check(a.dim() == 2 and b.dim() == 2, "a.dim() == 2 && b.dim() == 2 && c.dim() == 2")
    torch_check(a.shape[1] == b.shape[0], "a.size(1) == b.size(0)")
    torch_check(a.stride(1) == 1, "a.stride(1) == 1")
    torch_check(b.stride(0) == 1, "b.stride(0) == 1")
    torch_check(b.stride(1) % 16 == 0, "b.stride(1) % 16 == 0")
    torch_check(capability() >= 90, f"No compiled cutlass_scaled_mm for {capability()}")
    for scales in (a_scales, b_scales):
        torch_check(scales.dtype == torch.float32, "a_scales.scalar_type() == Float")
    (m, k), n = a.shape, b.shape[1]
    plain = a_scales.numel() in (1, m) and b_scales.numel() in (1, n)
    not_doubled(not plain, "scales of a tensor, a row or a column, which these are by their number")
    torch_check(a_scales.dim() == 2, "a scale must be 2d tensor.")
    torch_check(b_scales.dim() == 2, "b scale must be 2d tensor.")
    groups, columns = -(-k // 128), -(-n // 128)
    torch_check(tuple(a_scales.shape) == (m, groups), "a_scale_group_shape must be [1, 128].")
    torch_check(tuple(b_scales.shape) == (groups, columns), "b_scale_group_shape must be [128, 128].")
    torch_check(bias is None, "Bias not yet supported blockwise scaled_mm")
    if capability() < 100:  # from sm_100 on such an M runs with A and B swapped
        torch_check(m % 4 == 0, "m must be divisible by 4")
    for name, values in (("a", a), ("b", b)):
        misread(values.dtype == FP8, f"{name} of {values.dtype}, not {FP8}")
        torch_check(values.data_ptr() % 16 == 0, f"{name} is aligned to 16 bytes (its tensor map)")
    if m == 0:
        return
    # make_cute_packed_stride: the strides of A and B are those of packed matrices.
    left = packed(a, "a", (m, k)).float()
    right = addressed(b, "b", (k, n), (1, k)).float()
    # {Sm90,Sm100,Sm120}BlockwiseScaleConfig<1, 128, 128, Major::MN, Major::K>, compact:
    # tile_atom_to_shape_SFA and _SFB of CUTLASS's cutlass/detail/blockwise_scale_layout.hpp.
    rows = addressed(a_scales, "a_scales", (m, groups), (1, m))
    blocks = addressed(b_scales, "b_scales", (groups, columns), (1, groups))
    left = left * rows.repeat_interleave(128, 1)[:, :k]
    right = right * blocks.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    c.copy_(left @ right)
