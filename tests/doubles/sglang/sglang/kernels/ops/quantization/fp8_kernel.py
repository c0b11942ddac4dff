"""kernels/ops/quantization/fp8_kernel.py of SGLang 0.5.23: FP8 in groups of a row."""

import torch

from ...._kernel import fp8, fp8_max, not_doubled


def sglang_per_token_group_quant_fp8(
    x,
    group_size,
    eps=1e-10,
    column_major_scales=False,
    scale_tma_aligned=False,
    scale_ue8m0=False,
    fuse_silu_and_mul=False,
    masked_m=None,
    *,
    output_q=None,
    output_s=None,
):
    """Line 489. [..., K] into FP8 and fp32 scales [..., K / group_size], row-major."""
    plain = not (column_major_scales or scale_tma_aligned or fuse_silu_and_mul or masked_m is not None)
    not_doubled(plain and output_q is None and output_s is None, "other outputs of the quantiser")
    assert x.shape[-1] % group_size == 0, "the last dimension is a multiple of group_size"
    assert x.is_contiguous(), "`x` is not contiguous"
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1).clamp_min(eps) / fp8_max()
    if scale_ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (groups / scale[..., None]).clamp(-fp8_max(), fp8_max())
    return values.flatten(-2).to(fp8()), scale


# Line 656 on CUDA. On HIP it is _per_token_group_quant_8bit_raw, whose fourth positional argument is `dtype`.
per_token_group_quant_fp8 = sglang_per_token_group_quant_fp8
