"""The FP8 GEMMs: host checks of csrc/apis/gemm.hpp and csrc/jit_kernels/impls, then what the kernels compute.

Scales are read from storage through the transformed tensors as the kernels' descriptors and pointers do;
products are accumulated in fp32, so results differ from tensor cores only by rounding.
"""

import torch

from . import _layout
from ._arch import arch_major, mk_alignment
from ._errors import device_trap, host_assert, not_doubled

BLOCK_K = 128


def operand(t: torch.Tensor, dims: int) -> str:
    """csrc/utils/layout.hpp get_major_type_ab, check_ab_fp8_fp4; runtime_utils.hpp make_tma_2d_desc."""
    major = _layout.major(t)
    host_assert(t.dim() == dims, "t.dim() == N")
    not_doubled(t.dtype != torch.int8, "packed FP4")
    host_assert(t.dtype == torch.float8_e4m3fn, "ab.scalar_type() == torch::kFloat8_e4m3fn")
    if arch_major() == 9:  # fp8_requires_k_major
        host_assert(major == "K", "major == cute::UMMA::Major::K")
    return major


def output(d: torch.Tensor, dims: int) -> None:
    """csrc/utils/layout.hpp check_major_type_cd: row-major only."""
    _layout.major(d)
    host_assert(d.stride(-1) == 1, "t.stride(-1) == 1")
    host_assert(d.dim() == dims, "t.dim() == N")


def tma(t: torch.Tensor, major: str = "K") -> None:
    """A tensor map: address and outer stride in multiples of 16 bytes (strings of the wheel's _C.so; upstream
    leaves it to cuTensorMapEncodeTiled)."""
    outer = t.stride(-2) if major == "K" else t.stride(-1)
    host_assert(t.data_ptr() % 16 == 0, "t.data_ptr() % 16u == 0u")
    host_assert(outer * t.element_size() % 16 == 0, "num_gmem_outer_stride_bytes % 16u == 0u")


def launchable(a, major_a, b, major_b, d, n: int) -> None:
    tma(a, major_a)
    tma(b, major_b)
    tma(d)
    if arch_major() == 9:  # sm90_fp8_gemm_1d2d.cuh
        device_trap(n % 8 == 0, "shape_n % 8 == 0")


def same_device(*tensors: torch.Tensor) -> None:
    device_trap(len({t.device for t in tensors}) == 1, "every tensor is on the same device")


def sfa_values(sfa: torch.Tensor, m: int, k: int) -> torch.Tensor:
    """[..., m, k] of fp32, as the tensor map of make_tma_sf_desc reads SFA: MN-major, rows aligned."""
    host_assert(sfa.data_ptr() % 16 == 0, "t.data_ptr() % 16u == 0u")
    values = sfa if sfa.dtype == torch.float32 else unpack_ue8m0(sfa)
    return values.repeat_interleave(BLOCK_K, -1)[..., :m, :k]


def unpack_ue8m0(packed: torch.Tensor) -> torch.Tensor:
    """2 ** (e - 127) of each byte, lowest first; 0xff is NaN, as the tensor cores' UE8M0 has it."""
    shifts = torch.arange(4, device=packed.device) * 8
    exponents = (packed[..., None] >> shifts) & 0xFF
    values = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 127)
    values = torch.where(exponents == 255, torch.nan, values)
    return values.flatten(-2)


def sfb_values(sfb: torch.Tensor, gran_n: int, n: int, k: int) -> torch.Tensor:
    """[..., n, k] of fp32. sm_90: 128x128 scales by pointer, with the strides of its major
    (sm90_fp8_gemm_1d2d.cuh stride_n_sfb, stride_k_sfb). sm_100: one row per n after the broadcast."""
    if sfb.dtype == torch.int32:
        return sfa_values(sfb, n, k)
    not_doubled(gran_n == 128, "the 1D1D kernel of sm_90 (recipe (1, 1, 128))")
    rows, columns = _layout.ceil_div(n, 128), _layout.ceil_div(k, BLOCK_K)
    strides = (columns, 1) if _layout.major(sfb) == "K" else (1, rows)
    if sfb.dim() == 3:
        read = sfb.as_strided((sfb.shape[0], rows, columns), (rows * columns, *strides))
    else:
        read = sfb.as_strided((rows, columns), strides)
    return read.repeat_interleave(128, -2).repeat_interleave(BLOCK_K, -1)[..., :n, :k]


def dispatchable(sfa: torch.Tensor) -> None:
    """csrc/apis/gemm.hpp: fp32 scales on sm_90, int32 on sm_100."""
    if sfa.dtype != (torch.float32 if arch_major() == 9 else torch.int32):
        raise RuntimeError("Unsupported architecture or scaling factor types")


def plain(c, alpha, epilogue, compiled_dims) -> None:
    not_doubled(c is None, "accumulation (c)")
    not_doubled(alpha is None and epilogue is None, "alpha and epilogues")
    if not isinstance(compiled_dims, str):
        raise TypeError("compiled_dims must be a str")


def pair(given):
    """The wheel's deep_gemm/__init__.py _parse_tensor_or_tuple: a bare tensor gets one scale of 1."""
    if type(given) in (tuple, list):
        return given[0], given[1]
    assert isinstance(given, torch.Tensor), (
        "Expected Tensor, (Tensor, Tensor) tuple, or [Tensor, Tensor] list"
    )
    return given, torch.ones(1, dtype=torch.float32, device=given.device)


def dense(a, b, d, recipe, recipe_a, recipe_b, disable_ue8m0_cast) -> None:
    """csrc/apis/gemm.hpp fp8_fp4_gemm_nt: d[m, n] = a[m, k] @ b[n, k].T"""
    (a, sfa), (b, sfb) = pair(a), pair(b)
    same_device(a, sfa, b, sfb, d)
    major_a, major_b = operand(a, 2), operand(b, 2)
    output(d, 2)
    (m, k), (n, _) = a.shape, b.shape
    host_assert(d.shape == (m, n) and b.shape[1] == k, "m == m_ and n == n_ and k == k_")
    host_assert(d.dtype in (torch.bfloat16, torch.float32), "d.scalar_type() == kBFloat16 or kFloat")
    if m == 0 or n == 0:  # early_return
        return
    if k == 0:
        d.zero_()
        return
    sfa, sfb, gran_n = _layout.transform_pair(
        sfa, sfb, m, n, k, recipe, recipe_a, recipe_b, None, None, disable_ue8m0_cast
    )
    dispatchable(sfa)
    if arch_major() == 9:  # sm90_fp8_gemm_1d2d.hpp
        host_assert(d.dtype == torch.bfloat16, "d.scalar_type() == torch::kBFloat16")
    launchable(a, major_a, b, major_b, d, n)
    left, right = a.float() * sfa_values(sfa, m, k), b.float() * sfb_values(sfb, gran_n, n, k)
    d.copy_(left @ right.T)


def grouped_contiguous(
    a, b, d, grouped_layout, recipe, recipe_a, recipe_b, disable_ue8m0_cast, psum: bool
) -> None:
    """csrc/apis/gemm.hpp m_grouped_fp8_fp4_gemm_nt_contiguous: rows of one tile share one expert."""
    (a, sfa), (b, sfb) = pair(a), pair(b)
    same_device(a, sfa, b, sfb, d, grouped_layout)
    major_a = _layout.major(a)
    host_assert(major_a == "K", "major_a == cute::UMMA::Major::K")
    operand(a, 2)
    major_b = operand(b, 3)
    host_assert(grouped_layout.is_contiguous(), "grouped_layout.is_contiguous()")
    (m, k), (groups, n, _) = a.shape, b.shape
    host_assert(d.dim() == 2 and d.shape == (m, n) and b.shape[2] == k, "m == m_ and n == n_ and k == k_")
    host_assert(n > 0 and k > 0 and groups > 0, "n > 0 and k > 0 and num_groups > 0")
    host_assert(d.dtype == torch.bfloat16, "d.scalar_type() == torch::kBFloat16")
    host_assert(grouped_layout.dtype == torch.int32, "grouped_layout.scalar_type() == torch::kInt")
    if psum:
        host_assert(grouped_layout.shape == (groups,), "num_groups == num_groups_")
    else:
        host_assert(grouped_layout.shape == (m,), "m == m__")
    output(d, 2)
    if m == 0:
        return
    sfa, sfb, gran_n = _layout.transform_pair(
        sfa,
        sfb,
        m,
        n,
        k,
        recipe,
        recipe_a,
        recipe_b,
        None,
        groups,
        disable_ue8m0_cast,
        grouped_layout if psum else None,
    )
    dispatchable(sfa)
    launchable(a, major_a, b, major_b, d, n)
    left, right = a.float() * sfa_values(sfa, m, k), b.float() * sfb_values(sfb, gran_n, n, k)
    layout = grouped_layout.tolist()
    if psum:
        by_ends(left, right, d, layout)
        return
    device_trap(max(layout) < groups, "grouped_layout is beyond the experts: SFB is read out of bounds")
    tile = mk_alignment()  # heuristics/sm90.hpp and sm100.hpp: block_m
    wave = 64 if arch_major() == 9 else tile  # sm_90: a warpgroup skips 64 rows (is_computation_valid)
    for start in range(0, m, tile):
        expert = max(0, layout[start])  # scheduler/gemm.cuh get_global_idx: the tile's first row decides
        for first in range(start, min(m, start + tile), wave):
            rows = slice(first, min(m, first + wave, start + tile))
            if arch_major() == 9 and layout[first] < 0:
                d[rows] = 0  # the accumulators are stored all the same
            else:
                d[rows] = (left[rows] @ right[expert].T).to(d.dtype)


def by_ends(left, right, d, ends: list[int]) -> None:
    """scheduler/gemm.cuh MGroupedContiguousWithPsumLayout: an expert's rows start at the end before it,
    rounded up to a tile, and its last tile is written whole."""
    device_trap(max(ends) <= left.shape[0], "the psum layout is within m")
    tile, start = mk_alignment(), 0
    wave = 64 if arch_major() == 9 else tile
    for expert, end in enumerate(ends):
        device_trap(end >= start, "an expert without rows ends where it starts (the difference is unsigned)")
        for first in range(start, end, wave):
            rows = slice(first, min(left.shape[0], first + wave))
            d[rows] = (left[rows] @ right[expert].T).to(d.dtype)
        stop = _layout.ceil_div(end, tile) * tile
        if arch_major() == 9:  # a warpgroup past the end skips its products and stores zeros
            d[start + _layout.ceil_div(end - start, wave) * wave : stop] = 0
        start = stop


def grouped_masked(a, b, d, masked_m, expected_m, recipe, recipe_a, recipe_b, disable_ue8m0_cast) -> None:
    """csrc/apis/gemm.hpp m_grouped_fp8_fp4_gemm_nt_masked. Tiles are whole: rows from masked_m to the end of
    its tile are written with whatever A's padding gives, those after it are left."""
    (a, sfa), (b, sfb) = pair(a), pair(b)
    same_device(a, sfa, b, sfb, d, masked_m)
    for t in (a, b):
        host_assert(
            _layout.major(t) == "K", "major_a == cute::UMMA::Major::K and major_b == cute::UMMA::Major::K"
        )
        operand(t, 3)
    host_assert(masked_m.is_contiguous(), "masked_m.is_contiguous()")
    host_assert(d.dim() == 3, "t.dim() == N")
    (groups, m, k), n = a.shape, b.shape[1]
    numbers = groups == b.shape[0] == d.shape[0] == masked_m.numel()
    host_assert(
        numbers, "num_groups == num_groups_ and num_groups == num_groups__ and num_groups == num_groups___"
    )
    host_assert(d.shape[1:] == (m, n) and b.shape[2] == k, "m == m_ and n == n_ and k == k_")
    if not isinstance(expected_m, int):
        raise TypeError("expected_m must be an int")
    host_assert(
        min(expected_m, m, n, k, groups) > 0,
        "expected_m > 0 and m > 0 and n > 0 and k > 0 and num_groups > 0",
    )
    host_assert(d.dtype == torch.bfloat16, "d.scalar_type() == torch::kBFloat16")
    host_assert(masked_m.dtype == torch.int32, "masked_m.scalar_type() == torch::kInt")
    output(d, 3)
    sfa, sfb, gran_n = _layout.transform_pair(
        sfa, sfb, m, n, k, recipe, recipe_a, recipe_b, groups, groups, disable_ue8m0_cast
    )
    dispatchable(sfa)
    launchable(a, "K", b, "K", d, n)
    left, right = a.float() * sfa_values(sfa, m, k), b.float() * sfb_values(sfb, gran_n, n, k)
    largest = 128 if arch_major() == 9 else mk_alignment()  # heuristics: sm_90 takes 64 or 128
    smallest = 64 if arch_major() == 9 else mk_alignment()
    for group, rows in enumerate(masked_m.flatten().tolist()):
        device_trap(0 <= rows <= m, "masked_m is within m")
        # D's map has the groups one after the other: a tile past m writes the next group's rows.
        inside = _layout.ceil_div(rows, largest) * largest <= m or group == groups - 1
        device_trap(inside, f"a tile of {largest} rows past m={m} overwrites the next group")
        written = min(m, _layout.ceil_div(rows, smallest) * smallest)
        d[group, :written] = (left[group, :written] @ right[group].T).to(d.dtype)
