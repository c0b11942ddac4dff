"""vllm/model_executor/layers/quantization/utils/fp8_utils.py of vLLM 0.33.0: FP8 in groups of a row, alone
and behind a gated activation, and weights made ready for DeepGEMM."""

from collections.abc import Sequence

import torch

from vllm._kernel import FP8, FP8_MAX, addressed, packed, undefined
from vllm.utils.deep_gemm import (
    get_tma_aligned_size,
    is_deep_gemm_e8m0_used,
    per_block_cast_to_fp8,
    transform_sf_into_required_layout,
)


def _quantised(values: torch.Tensor, group: int, eps: float, ue8m0: bool):
    """[M, K] of fp32 as FP8 and its scales [M, K / group]."""
    groups = values.unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1).clamp_min(eps) / FP8_MAX
    if ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    quantised = (groups / scale[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return quantised.flatten(-2).to(FP8), scale


def _ue8m0_packed(scale: torch.Tensor) -> torch.Tensor:
    """[M, G] of powers of two as int32 [M, ceil(G / 4)], column-major, M rounded up to 4 in its columns."""
    m, groups = scale.shape
    exponents = torch.zeros(m, -(-groups // 4) * 4, dtype=torch.uint8, device=scale.device)
    exponents[:, :groups] = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    columns, aligned = exponents.shape[1] // 4, -(-m // 4) * 4
    storage = torch.full((aligned * columns,), -1, dtype=torch.int32, device=scale.device)
    out = storage.as_strided((m, columns), (1, aligned))
    return out.copy_(exponents.view(torch.int32))


def per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Line 632. Scales are row-major, or column-major with columns of M rows or (TMA) of M rounded up to
    4."""
    if use_ue8m0 is None:
        use_ue8m0 = is_deep_gemm_e8m0_used()
    assert x.shape[-1] % group_size == 0, "the last dimension of `x` must be divisible by `group_size`"
    assert x.stride(-1) == 1, "`x` groups must be contiguous"
    assert out_q is None or out_q.shape == x.shape
    values, scale = _quantised(x.float(), group_size, eps, use_ue8m0)
    out = torch.empty(x.shape, dtype=dtype or FP8, device=x.device) if out_q is None else out_q
    out.copy_(values)
    if not column_major_scales:
        return out, scale.contiguous()
    *batch, m, groups = scale.shape
    column = get_tma_aligned_size(m, 4) if tma_aligned_scales else m
    scales = torch.full((*batch, groups, column), torch.nan, device=x.device).mT[..., :m, :]
    return out, scales.copy_(scale)


def per_token_group_quant_fp8_packed_for_deepgemm(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    use_ue8m0: bool | None = None,
    out_q: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Line 766."""
    if use_ue8m0 is None:
        use_ue8m0 = is_deep_gemm_e8m0_used()
    assert use_ue8m0, "per_token_group_quant_fp8_packed_for_deepgemm requires UE8M0 scales."
    assert x.shape[-1] % group_size == 0, "the last dimension of `x` must be divisible by `group_size`"
    assert x.stride(-1) == 1, "`x` groups must be contiguous"
    values, scale = _quantised(x.float(), group_size, eps, True)
    out = torch.empty(x.shape, dtype=FP8, device=x.device) if out_q is None else out_q
    return out.copy_(values), _ue8m0_packed(scale.flatten(0, -2))


def _live(m: int, expert_ends: torch.Tensor | None, alignment: int, device) -> torch.Tensor:
    """The rows that a kernel with `expert_ends` writes: an expert's start at the end before, rounded up."""
    live = torch.ones(m, dtype=torch.bool, device=device)
    if expert_ends is None:
        assert alignment == 0
        return live
    assert expert_ends.ndim == 1 and expert_ends.numel() > 0
    assert expert_ends.dtype == torch.int32
    assert expert_ends.device == device and expert_ends.is_contiguous()
    live[:] = False
    start = 0
    for end in expert_ends.tolist():
        if end > m:
            raise RuntimeError(f"memory access fault: rows to {end} of {m}")
        live[start:end] = True
        start = -(-end // alignment) * alignment
    return live


def silu_mul_per_token_group_quant_fp8_colmajor(
    input: torch.Tensor,
    output: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
    eps: float = 1e-10,
    clamp_limit: float | None = None,
    group_size: int = 128,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    expert_ends: torch.Tensor | None = None,
    expert_alignment: int = 0,
):
    """Line 472. Input [M, N] with the gate first, packed; FP8 [M, N / 2] and fp32 scales in columns of M
    rows. Padding of experts is left unwritten."""
    assert input.ndim == 2
    assert output is None or output.ndim == 2
    assert input.size(0) % group_size == 0
    assert input.size(1) % (group_size * 2) == 0
    if use_ue8m0 is None:
        use_ue8m0 = is_deep_gemm_e8m0_used()
    m, n = input.shape
    half = n // 2
    assert m % 8 == 0 and half % group_size == 0
    assert expert_ends is None or (expert_alignment > 0 and expert_alignment % 8 == 0)
    live = _live(m, expert_ends, expert_alignment, input.device)
    if output is None:
        output = undefined((m, half), FP8, input.device)
    source, dtype = packed(input, "input", (m, n)), input.dtype
    gate, up = source[:, :half].float(), source[:, half:].float()
    if clamp_limit is not None:
        gate = gate.clamp_max(clamp_limit).to(dtype).float()
        up = up.clamp(-clamp_limit, clamp_limit).to(dtype).float()
    glu = (gate / (1.0 + torch.exp(-gate * alpha))).to(dtype)
    values, scale = _quantised((glu * (up + beta).to(dtype)).float(), group_size, eps, use_ue8m0)
    packed(output, "output", (m, half))[live] = values[live]
    scales = torch.full((half // group_size, m), torch.nan, device=input.device).T
    scales[live] = scale[live]
    return output, scales


def silu_mul_quant_fp8_packed_triton(
    input: torch.Tensor,
    group_size: int = 128,
    output_q: torch.Tensor | None = None,
    clamp_limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    expert_ends: torch.Tensor | None = None,
    expert_alignment: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Line 259. Packed UE8M0 scales [M, ceil(N / 2 / group / 4)] for DeepGEMM on sm_100; padding of
    experts is left unwritten."""
    assert input.dim() == 2
    assert input.is_contiguous()
    m, n = input.shape
    half = n // 2
    assert half % group_size == 0
    assert expert_ends is None or expert_alignment > 0
    live = _live(m, expert_ends, expert_alignment, input.device)
    if output_q is None:
        output_q = undefined((m, half), FP8, input.device)
    gate, up = input[:, :half].float(), input[:, half:].float()
    if clamp_limit is not None:
        gate, up = gate.clamp_max(clamp_limit), up.clamp(-clamp_limit, clamp_limit)
    product = (up + beta) * (gate / (1.0 + torch.exp(-gate * alpha)))
    values, scale = _quantised(product.to(torch.bfloat16).float(), group_size, 1e-10 * FP8_MAX, True)
    out = addressed(output_q, "output_q", (m, half), (output_q.stride(0), 1))
    out[live] = values[live]
    scales = _ue8m0_packed(scale)
    scales[~live] = -1
    return output_q, scales


def requant_weight_ue8m0_inplace(
    weight: torch.Tensor, weight_scale: torch.Tensor, block_size: Sequence[int] = (128, 128)
) -> None:
    """Line 1096."""
    if weight.numel() == 0:
        return
    if weight.dtype != FP8:
        raise ValueError(f"Expected *weight* to be {FP8}, got {weight.dtype} instead.")
    block_m, block_k = block_size
    weights = weight.reshape(-1, *weight.shape[-2:])
    scales = weight_scale.reshape(-1, *weight_scale.shape[-2:])
    for values, scale in zip(weights, scales, strict=True):
        m, k = values.shape
        full = scale.repeat_interleave(block_m, 0).repeat_interleave(block_k, 1)[:m, :k]
        again, power = per_block_cast_to_fp8(values.float() * full, [block_m, block_k], use_ue8m0=True)
        values.copy_(again)
        scale.copy_(power)


def deepgemm_post_process_fp8_weight_block(
    wq: torch.Tensor,
    ws: torch.Tensor,
    quant_block_shape: tuple[int, ...],
    use_e8m0: bool,
    is_bmm: bool = False,
    bmm_batch_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Line 1195, for fp32 scales. The weights and their scales are quantised again in place."""
    assert wq.dtype == FP8, f"Expected quantized tensor dtype to be {FP8}, got {wq.dtype} instead."
    assert ws.dtype == torch.float32, f"Expected tensor scales dtype to be torch.float32, got {ws.dtype}"
    if is_bmm:
        raise NotImplementedError("the double of vLLM does not cover is_bmm")
    if use_e8m0:
        requant_weight_ue8m0_inplace(wq, ws, quant_block_shape)
    values, scales = (wq[None], ws[None]) if wq.ndim == 2 else (wq, ws)
    ready = transform_sf_into_required_layout(
        sf=scales,
        mn=values.size(1),
        k=values.size(2),
        recipe=(1, quant_block_shape[0], quant_block_shape[1]),
        num_groups=values.size(0),
        is_sfa=False,
    )
    return wq, ready[0] if wq.ndim == 2 else ready


def prepare_fp8_moe_layer_for_deepgemm(
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    block_shape: tuple[int],
):
    """Line 1256."""
    used = is_deep_gemm_e8m0_used()
    w13, w13_scale = deepgemm_post_process_fp8_weight_block(w13, w13_scale, block_shape, used)
    w2, w2_scale = deepgemm_post_process_fp8_weight_block(w2, w2_scale, block_shape, used)
    return w13, w2, w13_scale, w2_scale
