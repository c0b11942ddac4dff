"""kernels/ops/quantization/fp8_kernel.py of SGLang 0.5.23: FP8 in groups of a row, with the layouts of scales
that DeepGEMM reads."""

import torch

from ...._kernel import FP8, packed, poisoned, quantised


def create_per_token_group_quant_fp8_output_scale(
    x_shape,
    device,
    group_size,
    column_major_scales: bool,
    scale_tma_aligned: bool,
    scale_ue8m0: bool,
):
    """Line 346."""
    *batch, m, k = x_shape
    groups = k // group_size
    if scale_ue8m0 and column_major_scales and scale_tma_aligned:
        shape = (*batch, -(-groups // 4), -(-m // 4) * 4)
        return poisoned(shape, torch.int32, device).mT[..., :m, :]
    if scale_ue8m0:
        assert not column_major_scales, "column_major_scales requires scale_tma_aligned=True"
        return poisoned((*batch, m, groups), torch.float32, device)
    if column_major_scales:
        column = -(-m // 4) * 4 if scale_tma_aligned else m
        return poisoned((*batch, groups, column), torch.float32, device).mT[..., :m, :]
    return poisoned((*batch, m, groups), torch.float32, device)


def sglang_per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    *,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
):
    """Line 489."""
    if fuse_silu_and_mul or masked_m is not None:
        raise NotImplementedError("the double of SGLang does not cover a fused or masked quantiser here")
    assert x.shape[-1] % group_size == 0, "the last dimension of `x` cannot be divisible by `group_size`"
    assert x.is_contiguous(), "`x` is not contiguous"
    values, scale = quantised(x.float(), group_size, scale_ue8m0, eps)
    if output_q is None:
        output_q = torch.empty(x.shape, dtype=FP8, device=x.device)
    if output_s is None:
        output_s = create_per_token_group_quant_fp8_output_scale(
            x.shape, x.device, group_size, column_major_scales, scale_tma_aligned, scale_ue8m0
        )
    output_q.copy_(values)
    output_s.copy_(packed(scale) if output_s.dtype == torch.int32 else scale)
    return output_q, output_s


per_token_group_quant_fp8 = sglang_per_token_group_quant_fp8
