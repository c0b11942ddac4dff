"""Signatures and Python checks: flashinfer/gemm/gemm_base.py of 0.6.18; the C++ behind each is named."""

from __future__ import annotations

from typing import Literal

import torch

from .._kernel import FP8, ceil_div, dense, expand, icheck, packed, quantised, raw, unseen
from ..utils import BackendSupportedError, get_compute_capability

_GROUPWISE = {
    "cutlass": (100, 103, 107, 120, 121),
    "trtllm": (100, 103, 107),
    "cutile": (100, 103, 110, 120, 121),
}


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def fp8_blockscale_gemm_sm90(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """csrc/fp8_blockscale_gemm_sm90_binding.cu runGemm, then TensorRT-LLM's DeepGEMM in csrc/nv_internal."""
    _demand(
        get_compute_capability(input.device)[0] == 9, "fp8_blockscale_gemm_sm90 is only supported on SM90"
    )
    _demand(input.ndim == 2, f"Input must be 2D (M, K), got shape {input.shape}")
    _demand(weight.ndim == 2, f"Weight must be 2D (N, K), got shape {weight.shape}")
    (m, k), (n, k_weight) = input.shape, weight.shape
    _demand(k_weight == k, f"K dimension mismatch: input has K={k}, weight has K={k_weight}")
    _demand(k % 128 == 0, f"K dimension must be divisible by block size (128), got K={k}")
    _demand(n % 64 == 0, f"N dimension must be divisible by 64, got N={n}")
    fp8_input, fp8_weight = input.dtype == FP8, weight.dtype == FP8
    _demand(not (fp8_input and weight.dtype == torch.bfloat16), "FP8 input + BF16 weight is not supported")
    if fp8_input:
        _demand(input_scale is not None, "input_scale is required when input is FP8.")
        _demand(input_scale.dtype == torch.float32, f"input_scale must be float32, got {input_scale.dtype}")
        _demand(input_scale.device == input.device, "input_scale device mismatch.")
    else:
        _demand(input.dtype == torch.bfloat16, f"Input must be either FP8 or BF16, got {input.dtype}")
        _demand(input_scale is None, "input_scale should not be provided for BF16 inputs.")
    if fp8_weight:
        _demand(weight_scale is not None, "weight_scale is required when weight is FP8.")
        fits = tuple(weight_scale.shape) in ((n, k // 128), (ceil_div(n, 128), k // 128))
        _demand(fits, f"weight_scale shape mismatch, got {weight_scale.shape}")
        _demand(
            weight_scale.dtype == torch.float32, f"weight_scale must be float32, got {weight_scale.dtype}"
        )
    else:
        _demand(weight.dtype == torch.bfloat16, f"Weight must be either FP8 or BF16, got {weight.dtype}")
        _demand(weight_scale is None, "weight_scale should not be provided for BF16 weights.")
    if out is not None:
        _demand(out.shape == (m, n), f"Output shape mismatch. Expected ({m}, {n}), got {out.shape}")
        _demand(out.device == input.device, "Output device mismatch.")
        _demand(
            out_dtype in (None, out.dtype), f"Output dtype mismatch. Expected {out_dtype}, got {out.dtype}"
        )
    out_dtype = out.dtype if out is not None else out_dtype or torch.bfloat16
    _demand(
        out_dtype in (torch.bfloat16, torch.float16),
        f"Output dtype must be bfloat16 or float16, got {out_dtype}",
    )
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=input.device)
    dense(input, "input", input.dtype)
    dense(weight, "weight", weight.dtype)
    dense(out, "out", out.dtype)
    if m == 0:  # fp8_gemm_run
        return out
    left, right = _activations(input, input_scale), _weights(weight, weight_scale)
    # The binding casts the output pointer to __nv_bfloat16: a float16 tensor is left with bfloat16's bits.
    out.view(torch.bfloat16).copy_(left @ right.T)
    return out


def _activations(input, scale):
    """deep_gemm/fp8_gemm.cuh make_2d_tma_scales_a_desc: [K/128, M rounded up to 4], M fastest, by pointer.
    The docstring's (M, K // 128) is not looked at."""
    if scale is None:
        return quantised(input, 1)
    m, k = input.shape
    read = raw(scale, (m, k // 128), (1, ceil_div(m, 4) * 4), "input_scale")
    return input.float() * expand(read, m, k, (1, 128))


def _weights(weight, scale):
    """deep_gemm/fp8_gemm_impl.cuh: scales_b[n / 128 * K/128 + k]: a scale per 128x128, by pointer, though a
    shape of (N, K/128) is let through and then read as if it were (N/128, K/128)."""
    if scale is None:
        return quantised(weight, 128)
    n, k = weight.shape
    return weight.float() * expand(
        packed(scale, (ceil_div(n, 128), k // 128), "weight_scale"), n, k, (128, 128)
    )


def gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: Literal["MN", "K"] | None = None,
    mma_sm: int = 1,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Literal["cutlass", "trtllm", "cutile"] = "cutlass",
) -> torch.Tensor:
    """csrc/gemm_groupwise_sm100.cu (cutlass), csrc/trtllm_gemm_runner.cu (trtllm). Scales are read by
    pointer; no shape of theirs is checked."""
    major, minor = get_compute_capability(a.device)
    if major * 10 + minor not in _GROUPWISE.get(backend, ()):
        where = f"backend '{backend}' with capability {major * 10 + minor}"
        raise BackendSupportedError(f"gemm_fp8_nt_groupwise does not support {where}")
    _demand(a.ndim == 2 and b.ndim == 2, f"Shape mismatch. a.shape = {a.shape}, b.shape = {b.shape}")
    (m, k), (n, k_b) = a.shape, b.shape
    _demand(k == k_b, f"Shape mismatch. a.shape[1] = {k}, b.shape[1] = {k_b}")
    dtype = out.dtype if out is not None else out_dtype or torch.bfloat16
    _demand(dtype in (torch.bfloat16, torch.float16), f"Unsupported output dtype: {dtype}.")
    if backend == "cutile":
        raise NotImplementedError("the double of flashinfer does not cover backend='cutile'")
    gran = tuple(scale_granularity_mnk)
    if backend == "cutlass":
        _demand(scale_major_mode is not None, "scale_major_mode is required in CUTLASS")
        icheck(scale_major_mode in ("K", "MN"), "Unsupported Scale Major Mode")
        icheck(mma_sm in (1, 2), "Unsupported MMA SM")
        icheck(gran in ((1, 128, 128), (128, 128, 128)), "Unsupported scale granularity")
        icheck(a.dtype in (FP8, torch.float8_e5m2), f"a is FP8, got {a.dtype}")
    else:
        _demand(gran == (1, 128, 128), "scale_granularity_mnk must be (1, 128, 128) in TRTLLM")
        _demand(k >= 256, "a.shape[1] must be >= 256 in TRTLLM")
        icheck(a.dtype == FP8, "a.dtype() == dl_float8_e4m3fn")
        unseen(dtype == torch.bfloat16, f"out is {dtype}, written as bfloat16")
    if out is None:
        out = torch.empty(m, n, dtype=dtype, device=a.device)
    unseen(out.shape == (m, n), f"out is {tuple(out.shape)}, written as {(m, n)}")
    dense(a, "a", a.dtype)
    dense(b, "b", a.dtype)
    dense(out, "out", dtype)
    # gemm_groupwise_sm100.cuh AlignmentA, AlignmentB, AlignmentC: 16 bytes; M as the docstring's note has it.
    icheck(k % 16 == 0 and n % 8 == 0, f"can_implement: K={k} in multiples of 16, N={n} of 8")
    # can_implement of gemm_groupwise_sm100.cuh; trtllm_gemm_runner.cu, which SGLang gives any M, has no such.
    icheck(backend == "trtllm" or m % 4 == 0, f"M={m} must be padded to a multiple of 4")
    groups, rows, columns = ceil_div(k, 128), ceil_div(m, gran[0]), ceil_div(n, 128)
    a_k_major = backend == "cutlass" and scale_major_mode == "K"
    # trtllm: A's scales M fastest, B's K fastest (tests/gemm/test_groupwise_scaled_gemm_fp8.py).
    b_k_major = backend == "trtllm" or scale_major_mode == "K"
    left = raw(a_scale, (rows, groups), (groups, 1) if a_k_major else (1, rows), "a_scale")
    right = raw(b_scale, (columns, groups), (groups, 1) if b_k_major else (1, columns), "b_scale")
    left = a.float() * expand(left, m, k, (gran[0], 128))
    right = b.float() * expand(right, n, k, (128, 128))
    return out.copy_(left @ right.T)
