"""Signatures of the wheel's deep_gemm/utils/layout.py; also reached from the package itself."""

from __future__ import annotations

import torch

from .. import _arch, _layout


def get_tma_aligned_size(mn: int, element_size: int) -> int:
    return _layout.tma_aligned_size(mn, element_size)


def get_mk_alignment_for_contiguous_layout() -> int:
    return _arch.mk_alignment()


def set_mk_alignment_for_contiguous_layout(new_value: int):
    _arch.set_mk_alignment(new_value)


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """heuristics/runtime.hpp of 2.6.1: 128 on sm_90; on sm_100 up to 224, less for a small expected_m. With
    num_groups expected_m is that of all groups (vLLM 0.33.0 vllm/utils/deep_gemm.py); the wheel's thresholds
    for it are compiled, those of 2.6.1 stand here."""
    if expected_m is not None and num_groups is not None:
        expected_m = _layout.ceil_div(expected_m, num_groups)
    if _arch.arch_major() != 10:
        return 128
    block_m = 224
    while expected_m is not None and block_m > 32 and block_m - 32 >= expected_m:
        block_m -= 32
    return block_m


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    return _layout.mn_major_tma_aligned(sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor, psum_layout: torch.Tensor | None = None
) -> torch.Tensor:
    return _layout.mn_major_packed_ue8m0(sf, psum_layout)
