"""kernels/ops/quantization/per_token_group_quant.py of SGLang 0.5.23, and the checks of
kernels/jit/csrc/gemm/per_token_group_quant.cuh."""

import torch

from ...._kernel import FP8, integers, packed, poisoned, quantised, silu_and_mul
from .fp8_kernel import create_per_token_group_quant_fp8_output_scale


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(what)


def per_token_group_quant(
    input: torch.Tensor,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
    group_size: int = 128,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    expected_m: int | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    sorted_token_ids: torch.Tensor | None = None,
    num_tokens_post_padded: torch.Tensor | None = None,
    num_valid_tokens: int = 0,
    silu_and_mul_mode: str = "legacy",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Line 196. [E, M, K], of which masked_m int32 [E] rows each, into FP8 and its scales; other rows are
    left. With fuse_silu_and_mul K is twice the output's, the gate first. Packed scales are int32, of
    UE8M0."""
    legacy = sorted_token_ids is None and silu_and_mul_mode == "legacy" and out_dtype in (None, FP8)
    if not legacy or (fuse_silu_and_mul and masked_m is None):
        raise NotImplementedError("the double of SGLang does not cover this mode of per_token_group_quant")
    assert group_size in (16, 32, 64, 128, 256)
    assert input.dtype in (torch.bfloat16, torch.float16) or not fuse_silu_and_mul
    shape = (*input.shape[:-1], input.shape[-1] // (2 if fuse_silu_and_mul else 1))
    groups = shape[-1] // group_size
    if output_q is None:
        assert output_s is None
        output_q = poisoned(shape, FP8, input.device)
        if scale_ue8m0 and not column_major_scales:
            output_s = poisoned((*shape[:-1], -(-groups // 4)), torch.int32, input.device)
        else:
            output_s = create_per_token_group_quant_fp8_output_scale(
                shape, input.device, group_size, column_major_scales, column_major_scales, scale_ue8m0
            )
    assert output_s is not None
    if output_s.dtype not in (torch.int32, torch.float32):
        raise ValueError(f"Unsupported output_s dtype {output_s.dtype}")
    if (output_s.dtype == torch.int32) != scale_ue8m0:
        raise ValueError("int32-packed scale buffers and scale_ue8m0 require one another")
    _check(input.stride(-1) == 1 and output_q.stride(-1) == 1, "rows of a last stride of 1")
    _check(tuple(output_q.shape) == shape and output_q.dtype == FP8, f"output_q {shape}")
    _check(shape[-1] % group_size == 0, "hidden_size % Trait::kGroupSize == 0")
    _check(output_s.shape[-1] == (-(-groups // 4) if scale_ue8m0 else groups), "num_scale_groups")
    inner = -1 if output_s.stride(-2) >= output_s.stride(-1) else -2
    _check(output_s.stride(inner) == 1, "scale_args.group_stride == 1 or scale_args.token_stride == 1")
    _check(input.stride(-2) * input.element_size() % 32 == 0, "input token stride must keep rows 32B-aligned")
    _check(input.data_ptr() % 32 == 0, "input base pointer must be 32B-aligned for the vectorized loads")
    values = silu_and_mul(input, input.dtype) if fuse_silu_and_mul else input.float()
    values, scale = quantised(values, group_size, scale_ue8m0)
    stored = packed(scale) if scale_ue8m0 else scale
    if masked_m is None:
        output_q.copy_(values)
        output_s.copy_(stored)
        return output_q, output_s
    _check(input.dim() == 3 and masked_m.shape == (input.shape[0],), "masked: [E, M, K] and masked_m [E]")
    for expert, live in enumerate(integers(masked_m, "masked_m", masked_m.numel())):
        _check(live <= input.shape[1], f"memory access fault: row {live} of {input.shape[1]}")
        output_q[expert, :live] = values[expert, :live]
        output_s[expert, :live] = stored[expert, :live]
    return output_q, output_s
