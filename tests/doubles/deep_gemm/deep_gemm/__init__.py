"""A double of sgl-deep-gemm 0.2.5 (SGLang's wheel of DeepGEMM), its FP8 block-scale GEMMs on sm_90, sm_100
and sm_103.

The host knows an architecture by its major number (csrc/jit/device_runtime.hpp get_arch_major), so that 10.3
wants what 10.0 does: scales of int32, packed or cast; get_arch compiles both for 100f. DeepGEMM 2.6.1
(54e2261) has the same checks, and its kernels know no sm_120 (csrc/utils/layout.hpp get_default_recipe).

Signatures are those of the wheel's deep_gemm/__init__.py and utils/layout.py. Upstream 2.6.1 has the same
names from pybind (no signature to inspect; csrc/apis/gemm.hpp register_apis) without `alpha` and `epilogue`,
and with compiled_dims "nk" for the dense GEMM. Version 1 (until 2025-07) had `gemm_fp8_fp8_bf16_nt(lhs, rhs,
out)` and `m_grouped_gemm_fp8_fp8_bf16_nt_{contiguous,masked}`.
"""

import torch

from . import _gemm, _layout
from . import utils as utils
from ._arch import arch_major
from ._arch import get_num_sms as get_num_sms
from ._arch import set_num_sms as set_num_sms
from ._errors import not_doubled
from .utils import *  # noqa: F403

__version__ = "0.2.5"


def fp8_fp4_gemm_nt(
    a,
    b,
    d,
    c=None,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    compiled_dims="",
    disable_ue8m0_cast=False,
    alpha=None,
    epilogue=None,
):
    _gemm.plain(c, alpha, epilogue, compiled_dims)
    _gemm.dense(a, b, d, recipe, recipe_a, recipe_b, disable_ue8m0_cast)


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a,
    b,
    d,
    grouped_layout,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    compiled_dims="nk",
    disable_ue8m0_cast=False,
    use_psum_layout=False,
    ensure_zero_padding=True,
    expected_m_for_psum_layout=None,
    epilogue=None,
):
    _gemm.plain(None, None, epilogue, compiled_dims)
    if use_psum_layout:
        not_doubled(ensure_zero_padding, "the psum layout with ensure_zero_padding=False")
    else:
        _layout.host_assert(expected_m_for_psum_layout is None, "not expected_m_for_psum_layout.has_value()")
    _gemm.grouped_contiguous(
        a, b, d, grouped_layout, recipe, recipe_a, recipe_b, disable_ue8m0_cast, use_psum_layout
    )


def m_grouped_fp8_fp4_gemm_nt_masked(
    a,
    b,
    d,
    masked_m,
    expected_m,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    compiled_dims="nk",
    disable_ue8m0_cast=False,
    epilogue=None,
):
    _gemm.plain(None, None, epilogue, compiled_dims)
    _gemm.grouped_masked(a, b, d, masked_m, expected_m, recipe, recipe_a, recipe_b, disable_ue8m0_cast)


fp8_gemm_nt = fp8_fp4_gemm_nt
m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
m_grouped_fp8_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn,
    k,
    recipe,
    num_groups=None,
    is_sfa=None,
    disable_ue8m0_cast=False,
    psum_layout=None,
):
    return _layout.transform(sf, mn, k, tuple(recipe), num_groups, is_sfa, disable_ue8m0_cast, psum_layout)


arch_major()  # an architecture that the library does not know fails here
