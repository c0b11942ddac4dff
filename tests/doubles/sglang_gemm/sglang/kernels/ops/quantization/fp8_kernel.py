"""kernels/ops/quantization/fp8_kernel.py of SGLang 0.5.23: the quantiser of the CUTLASS GEMM's rows."""

import torch


def sglang_per_token_group_quant_fp8_row_padded(
    x: torch.Tensor, group_size: int, eps: float = 1e-10, row_alignment: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Line 563. FP8 [M', K] and fp32 scales [M', K / group] in columns, M' being M rounded up; rows from M on
    are zeros. The GEMM's output has M' rows."""
    assert x.dim() == 2, "row-padded quant expects a 2D input"
    assert x.shape[-1] % group_size == 0, "the last dimension of `x` must be divisible by `group_size`"
    assert x.is_contiguous(), "`x` is not contiguous"
    m, k = x.shape
    rows = -(-m // row_alignment) * row_alignment
    values = torch.zeros(rows, k, device=x.device, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(k // group_size, rows, device=x.device).T
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1).clamp_min(eps) / 448.0
    values[:m] = (groups / scale[..., None]).clamp(-448.0, 448.0).flatten(-2).to(values.dtype)
    scales[:m] = scale
    return values, scales
