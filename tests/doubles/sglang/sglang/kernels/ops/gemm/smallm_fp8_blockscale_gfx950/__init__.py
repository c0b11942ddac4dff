"""kernels/ops/gemm/smallm_fp8_blockscale_gfx950: quantisation and GEMM in one kernel, for few tokens.

Its sizes are those of SHAPES alone, which no layer of DeepSeek-V3 has: there layers/quantization/fp8_utils.py
goes on to AITER (:1708-1713). The kernel is smallm_fp8_blockscale_gemm.hip of the repository (e3eddae), which
the wheel of 0.5.23 does not hold.
"""

import os

import torch

from sglang._kernel import addressed, arch

# __init__.py:14: (N, K) -> (most tokens, N tiles per block, K steps per wave, waves), the first that fits
SHAPES = {
    (5120, 4096): ((32, 2, 4, 16),),
    (4608, 4096): ((32, 2, 4, 16),),
    (4096, 2048): ((8, 1, 4, 8), (16, 1, 2, 16), (32, 1, 4, 8)),
    (2560, 4096): ((32, 1, 4, 16),),
    (4096, 1024): ((32, 1, 2, 8),),
}


def try_smallm_fp8_bs_linear(x, WQ, w_scale):
    """:31. x bf16 [M, K], WQ marked is_shuffled (AITER's (16, 16)), w_scale [N/128, K/128] -> bf16 [M, N], or
    None, where the caller goes another way."""
    (m, k), n = x.shape, WQ.shape[0]
    fits = any(m <= most for most, *_ in SHAPES.get((n, k), ()))
    if not (
        arch() == "gfx950"  # there: the module does not load on another architecture
        and os.environ.get("SGLANG_ROCM_SMALLM_FP8_BS", "1") != "0"
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and getattr(WQ, "is_shuffled", False)
        and w_scale.shape == (n // 128, k // 128)
        and w_scale.is_contiguous()
        and fits
    ):
        return None
    if w_scale.dtype != torch.float32 or WQ.element_size() != 1:
        raise RuntimeError(f"read as fp32 and bytes of FP8: {w_scale.dtype}, {WQ.dtype}")
    weight = addressed(WQ.view(torch.uint8), "WQ", (n // 16, k // 32, 2, 16, 16), (16 * k, 512, 256, 16, 1))
    weight = weight.permute(0, 3, 1, 2, 4).reshape(n, k).view(torch.float8_e4m3fn).float()
    groups = x.float().view(m, k // 128, 128)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) * (1.0 / 448.0)
    values = (groups * (1.0 / scale)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    full = w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return ((values * scale).view(m, k) @ (weight * full).T).bfloat16()
