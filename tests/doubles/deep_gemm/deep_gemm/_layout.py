"""Scaling factors: checks and transforms. From csrc/utils/layout.hpp, csrc/apis/layout.hpp and
csrc/jit_kernels/impls/smxx_layout.hpp of DeepGEMM 2.6.1; where the wheel sgl-deep-gemm 0.2.5 differs (its
csrc is compiled: the asserted expressions are strings in `_C.so`) the wheel is doubled."""

import torch

from ._arch import arch_major, mk_alignment
from ._errors import device_trap, host_assert, not_doubled


def ceil_div(x: int, y: int) -> int:
    return (x + y - 1) // y


def tma_aligned_size(mn: int, element_size: int) -> int:
    """csrc/utils/math.hpp get_tma_aligned_size: to 16 bytes."""
    host_assert(16 % element_size == 0, "kNumTMAAlignmentBytes % element_size == 0")
    per = 16 // element_size
    return ceil_div(mn, per) * per


def major(t: torch.Tensor) -> str:
    """csrc/utils/layout.hpp major_check and get_major_type_ab: "K" or "MN"."""
    host_assert(t.dim() in (2, 3), "dim == 2 or dim == 3")
    if t.dim() == 3:
        host_assert(t.stride(0) == t.size(-2) * t.size(-1), "t.stride(0) == t.size(-2) * t.size(-1)")
    host_assert(t.stride(-2) == 1 or t.stride(-1) == 1, "t.stride(-2) == 1 or t.stride(-1) == 1")
    return "K" if t.stride(-1) == 1 else "MN"


def default_recipe(sfa: torch.Tensor, sfb: torch.Tensor) -> tuple[int, int, int]:
    """csrc/utils/layout.hpp get_default_recipe."""
    if arch_major() == 9:
        both = sfa.dtype == sfb.dtype == torch.float32
        host_assert(both, "sfa_dtype == torch::kFloat and sfb_dtype == torch::kFloat")
        return 1, 128, 128
    host_assert(sfb.dtype in (torch.float32, torch.int32), "sfb_dtype is torch::kFloat or torch::kInt")
    return (1, 128, 128) if sfb.dtype == torch.float32 else (1, 1, 128)


def check_sf_layout(sf, mn, k, gran_mn, gran_k, num_groups, tma_stride=False, sm90_sfb=False):
    """csrc/utils/layout.hpp check_sf_layout."""
    host_assert(
        sf.dtype in (torch.float32, torch.int32), "sf_dtype == torch::kFloat or sf_dtype == torch::kInt"
    )
    host_assert(sf.dim() == 2 + (num_groups is not None), "sf.dim() == num_groups.has_value() + 2")
    if num_groups is not None:
        host_assert(sf.size(-3) == num_groups, "sf.size(-3) == num_groups.value()")
    host_assert(sf.size(-2) == ceil_div(mn, gran_mn), "sf.size(-2) == ceil_div(mn, gran_mn)")
    per = gran_k * (1 if sf.dtype == torch.float32 else 4)  # four exponents in an int32
    host_assert(sf.size(-1) == ceil_div(k, per), "sf.size(-1) == ceil_div(k, gran_k * (1 or 4))")
    if tma_stride:
        if num_groups is not None:
            whole = sf.stride(-3) == sf.stride(-1) * sf.size(-1)
            host_assert(whole, "sf.stride(-3) == sf.stride(-1) * sf.size(-1)")
        host_assert(sf.stride(-2) == 1 or mn == 1, "sf.stride(-2) == 1 or mn == 1")
        # 2.6.1 wants stride(-1) == the aligned size; the wheel's two expressions are looser.
        host_assert(sf.stride(-1) % 4 == 0, "sf.stride(-1) % 4 == 0")
        host_assert(sf.stride(-1) >= tma_aligned_size(mn, 4), "sf.stride(-1) >= compact_stride")
    if sm90_sfb:
        if num_groups is not None:
            host_assert(
                sf.stride(-3) == sf.size(-2) * sf.size(-1), "sf.stride(-3) == sf.size(-2) * sf.size(-1)"
            )
        plain = sf.stride(-1) == 1 and sf.stride(-2) == sf.size(-1)
        turned = sf.stride(-1) == sf.size(-2) and sf.stride(-2) == 1
        host_assert(plain or turned, "SFB is contiguous, or is after a transpose of its last two dimensions")
    return sf


def empty_mn_major(
    groups: int, mn: int, columns: int, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """smxx_layout.hpp: empty_strided, its padding never written. Poisoned here: to read it is wrong."""
    aligned = tma_aligned_size(mn, 4)
    poison = float("nan") if dtype.is_floating_point else -1
    storage = torch.full((groups * aligned * columns,), poison, dtype=dtype, device=like.device)
    return storage.as_strided((groups, mn, columns), (aligned * columns, 1, aligned))


def mn_major_tma_aligned(sf: torch.Tensor) -> torch.Tensor:
    """smxx_layout.hpp get_mn_major_tma_aligned_tensor: returned as it is where it has the layout already."""
    host_assert(sf.dim() in (2, 3), "dim == 2 or dim == 3")
    host_assert(sf.dtype == torch.float32, "sf.scalar_type() == torch::kFloat")
    batched = sf if sf.dim() == 3 else sf[None]
    groups, mn, columns = batched.shape
    aligned = tma_aligned_size(mn, 4)
    at_home = sf.dim() == 2 or batched.stride(0) == aligned * columns
    if at_home and batched.stride(1) == 1 and batched.stride(2) == aligned:
        return sf
    out = empty_mn_major(groups, mn, columns, sf, torch.float32).copy_(batched)
    return out if sf.dim() == 3 else out[0]


def within_groups(psum_layout: torch.Tensor, mn: int) -> torch.Tensor:
    """Whether each of mn rows is an expert's (smxx_layout.cuh transpose_and_pack_fp32_into_ue8m0)."""
    valid, start = torch.zeros(mn, dtype=torch.bool, device=psum_layout.device), 0
    for end in psum_layout.tolist():
        valid[start:end] = True
        start = ceil_div(end, mk_alignment()) * mk_alignment()
    return valid


def mn_major_packed_ue8m0(sf: torch.Tensor, psum_layout: torch.Tensor | None = None) -> torch.Tensor:
    """smxx_layout.hpp get_mn_major_tma_aligned_packed_ue8m0_tensor: exponents of four consecutive K groups in
    an int32, the first in its low byte (smxx_layout.cuh transpose_and_pack_fp32_into_ue8m0). Rows that no
    expert of `psum_layout` has are not read; their exponents are 0."""
    host_assert(sf.dim() in (2, 3), "dim == 2 or dim == 3")
    host_assert(sf.dtype == torch.float32, "sf.scalar_type() == torch::kFloat")
    batched = sf if sf.dim() == 3 else sf[None]
    groups, mn, columns = batched.shape
    bits = batched.contiguous().view(torch.int32)
    if psum_layout is not None:
        whole = groups == 1 and batched.is_contiguous()
        host_assert(whole, "num_sf_batches == 1 and batched_sf.is_contiguous()")
        right = psum_layout.dtype == torch.int32 and psum_layout.is_contiguous()
        host_assert(right, "psum_layout->scalar_type() == torch::kInt and psum_layout->is_contiguous()")
        host_assert(psum_layout.numel() > 0, "psum_layout->numel() > 0")
        bits = torch.where(within_groups(psum_layout, mn)[:, None], bits, 0)
    if batched.is_contiguous():
        in_torch = (mn * columns) % 4 != 0 and groups > 1
    else:
        in_torch = mn % 4 != 0 or groups > 1
        if not in_torch:
            turned = batched.stride(1) == 1 and batched.stride(2) == mn
            host_assert(turned, "batched_sf.stride(1) == 1 and batched_sf.stride(2) == mn")
    if not in_torch:  # the fallback in torch drops sign and mantissa without a word
        rounded = bool((bits & -0x7F800001 == 0).all())  # 0x807fffff as an int32
        device_trap(rounded, "(values[j] & 0x807fffffu) == 0: scales are powers of two")
    exponents = torch.zeros((groups, mn, ceil_div(columns, 4) * 4), dtype=torch.uint8, device=sf.device)
    exponents[..., :columns] = (bits >> 23).to(torch.uint8)
    packed = exponents.view(torch.int32)
    out = empty_mn_major(groups, mn, packed.shape[-1], sf, torch.int32).copy_(packed)
    return out if sf.dim() == 3 else out[0]


def transform(sf, mn, k, recipe, num_groups, is_sfa, disable_ue8m0_cast, psum_layout=None):
    """csrc/apis/layout.hpp transform_sf_into_required_layout."""
    if len(recipe) == 3:
        host_assert(is_sfa is not None, "is_sfa.has_value()")
        gran_mn, gran_k = recipe[0] if is_sfa else recipe[1], recipe[2]
    else:
        host_assert(is_sfa is None, "not is_sfa.has_value()")
        gran_mn, gran_k = recipe
    check_sf_layout(sf, mn, k, gran_mn, gran_k, num_groups)
    not_doubled(gran_k == 128, f"a K granularity of {gran_k}")
    as_fp32 = arch_major() == 9 or disable_ue8m0_cast
    if sf.dtype == torch.float32 and gran_mn == 1 and as_fp32:
        return mn_major_tma_aligned(sf)
    if sf.dtype == torch.float32 and gran_mn == 128 and as_fp32:
        return check_sf_layout(sf, mn, k, gran_mn, gran_k, num_groups, sm90_sfb=True)
    if sf.dtype == torch.float32 and arch_major() == 10:
        host_assert(not disable_ue8m0_cast, "not disable_ue8m0_cast")
        rows = torch.arange(mn, device=sf.device) // gran_mn
        broadcast = sf if gran_mn == 1 else sf.index_select(-2, rows)
        return mn_major_packed_ue8m0(broadcast, psum_layout)
    if sf.dtype == torch.int32 and gran_mn == 1 and arch_major() == 10:
        return check_sf_layout(sf, mn, k, gran_mn, gran_k, num_groups, tma_stride=True)
    raise RuntimeError("Unknown SF transformation")


def transform_pair(
    sfa, sfb, m, n, k, recipe, recipe_a, recipe_b, groups_a, groups_b, disable_ue8m0_cast, psum_layout=None
):
    """csrc/apis/layout.hpp transform_sf_pair_into_required_layout: SFA, SFB and SFB's rows per scale. The
    psum layout is of A alone."""
    if recipe is None and recipe_a is None:
        recipe = default_recipe(sfa, sfb)
    host_assert((recipe_a is None) == (recipe_b is None), "recipe_a.has_value() == recipe_b.has_value()")
    host_assert((recipe_a is None) != (recipe is None), "recipe_a.has_value() != recipe.has_value()")
    if recipe is not None:
        host_assert(len(recipe) == 3, "values.size() == 3")
        of_a, of_b, sides, gran_n = recipe, recipe, (True, False), recipe[1]
    else:
        host_assert(len(recipe_a) == len(recipe_b) == 2, "values->size() == 2")
        of_a, of_b, sides, gran_n = recipe_a, recipe_b, (None, None), recipe_b[0]
    sfa = transform(sfa, m, k, of_a, groups_a, sides[0], disable_ue8m0_cast, psum_layout)
    sfb = transform(sfb, n, k, of_b, groups_b, sides[1], disable_ue8m0_cast)
    return sfa, sfb, gran_n
