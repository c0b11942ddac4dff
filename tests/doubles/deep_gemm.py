"""DeepGEMM's FP8 products, dense and grouped, with the scale layouts that its kernels read.

From DeepGEMM 2.6.1 (csrc/apis/{gemm,layout}.hpp, csrc/utils/layout.hpp, csrc/jit_kernels/impls/
smxx_layout.hpp, heuristics/) and sgl-deep-gemm 0.2.5. On sm_90 scales of a are fp32, rows side by side and
columns at multiples of 16 bytes; those of b are fp32 per 128x128. On sm_100 and sm_103 both are exponents
(UE8M0) of every row, four of K in an int32. What has another layout the host brings into it, in the call.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.doubles.arithmetic import BLOCK, activations, need, read, weights

Pair = tuple[torch.Tensor, torch.Tensor]


class DeepGemm:
    def __init__(self, arch: str) -> None:
        self.hopper = arch == "sm_90"
        self.alignment = 128  # heuristics/runtime.hpp
        self.transformed = 0  # scales that a product brought into their layout

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By library and name; vLLM's wrappers hand on what they are given."""
        return {
            "deep_gemm.get_mk_alignment_for_contiguous_layout": lambda: self.alignment,
            "deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout": self.advice,
            "deep_gemm.set_mk_alignment_for_contiguous_layout": self.align,
            "deep_gemm.get_mn_major_tma_aligned_tensor": mn_major,
            "deep_gemm.m_grouped_fp8_gemm_nt_contiguous": self.contiguous,
            "deep_gemm.m_grouped_fp8_gemm_nt_masked": self.masked,
            "deep_gemm.fp8_gemm_nt": self.dense,
            "deep_gemm.transform_sf_into_required_layout": self.transform,
            "vllm.fp8_gemm_nt": self.dense,
            "vllm.transform_sf_into_required_layout": self.transform,
        }

    def advice(self, expected_m: int | None = None) -> int:
        """heuristics/runtime.hpp: 128 on sm_90; on sm_100 up to 224, less for few expected rows."""
        if self.hopper:
            return 128
        return next((rows for rows in range(32, 224, 32) if expected_m and rows >= expected_m), 224)

    def align(self, new_value: int) -> None:
        self.alignment = new_value

    def transform(
        self,
        sf: torch.Tensor,
        mn: int,
        k: int,
        recipe: tuple[int, int, int],
        num_groups: int | None = None,
        is_sfa: bool | None = None,
    ) -> torch.Tensor:
        """csrc/apis/layout.hpp transform_sf_into_required_layout: given back as it is where it fits."""
        need(is_sfa is not None, "is_sfa.has_value()")
        rows = recipe[0] if is_sfa else recipe[1]
        packed = sf.dtype == torch.int32
        need(packed or sf.dtype == torch.float32, "scales are fp32, or int32 of four exponents")
        need(sf.dim() == 2 + (num_groups is not None), "sf.dim() == num_groups.has_value() + 2")
        need(num_groups is None or len(sf) == num_groups, "sf.size(-3) == num_groups")
        need(recipe[2] == BLOCK and sf.shape[-2] == up(mn, rows), "sf.size(-2) == ceil_div(mn, gran_mn)")
        need(sf.shape[-1] == up(k, BLOCK * (4 if packed else 1)), "sf.size(-1) == ceil_div(k, gran_k)")
        if packed:
            need(not self.hopper and rows == 1, "Unknown SF transformation")
            aligned = sf.stride(-1) % 4 == 0 and sf.stride(-1) >= up(mn, 4) * 4
            need(aligned and (sf.stride(-2) == 1 or mn == 1), "packed scales lie MN-major, aligned for TMA")
            return sf
        if not self.hopper:
            every_row = sf if rows == 1 else sf.repeat_interleave(rows, -2)[..., :mn, :]
            return mn_major(exponents(every_row))
        if rows == 1:
            return mn_major(sf)
        need(sf.is_contiguous() or sf.mT.is_contiguous(), "SFB is contiguous, or is so when transposed")
        return sf

    def operands(self, a: Pair, b: Pair, grouped: bool, d: torch.Tensor) -> Pair:
        """fp32 [..., M, K] and [..., N, K], scales as the kernels' descriptors and pointers read them."""
        (a_q, sfa), (b_q, sfb) = a, b
        for t in (a_q, b_q):
            need(t.dtype == torch.float8_e4m3fn, "ab.scalar_type() == torch::kFloat8_e4m3fn")
            need(not self.hopper or t.stride(-1) == 1, "major == cute::UMMA::Major::K")
            need(t.stride(-1) == 1 or t.stride(-2) == 1, "t.stride(-2) == 1 or t.stride(-1) == 1")
            need(
                t.dim() == 2 or t.stride(0) == t.size(1) * t.size(2), "t.stride(0) == t.size(-2) * t.size(-1)"
            )
            need(t.data_ptr() % 16 == 0 and max(t.stride()[-2:]) % 16 == 0, "16 bytes: tensor maps")
        m, k = a_q.shape[-2:]
        n = b_q.shape[-2]
        need(b_q.shape[-1] == k and tuple(d.shape[-2:]) == (m, n), "m == m_ and n == n_ and k == k_")
        need(d.dtype == torch.bfloat16 and d.stride(-1) == 1 and n % 8 == 0, "d is bf16, of whole tiles")
        groups_a = len(a_q) if a_q.dim() == 3 else None
        given = (sfa, sfb)
        sfa = self.transform(sfa, m, k, (1, BLOCK, BLOCK), groups_a, True)
        of_every_row = sfb.dtype == torch.int32
        recipe = (1, 1 if of_every_row else BLOCK, BLOCK)  # get_default_recipe
        sfb = self.transform(sfb, n, k, recipe, len(b_q) if grouped else None, False)
        self.transformed += (sfa is not given[0]) + (sfb is not given[1])
        if not self.hopper:
            return activations(a_q, values(sfa)), activations(b_q, values(sfb))
        # sm90_fp8_gemm_1d2d.cuh: SFB by pointer, by the strides of its major.
        rows, columns = up(n, BLOCK), up(k, BLOCK)
        strides = (columns, 1) if sfb.stride(-1) == 1 else (1, rows)
        by_pointer = read(
            sfb, *b_q.shape[:-2], rows, columns, strides=(rows * columns, *strides)[-sfb.dim() :]
        )
        return activations(a_q, sfa), weights(b_q, by_pointer)

    def dense(self, a: Pair, b: Pair, d: torch.Tensor) -> None:
        left, right = self.operands(a, b, False, d)
        d.copy_(left @ right.T)

    def contiguous(self, a: Pair, b: Pair, d: torch.Tensor, grouped_layout: torch.Tensor) -> None:
        """Rows of one tile share one expert: the first row of a tile says which (scheduler/gemm.cuh). Of
        experts below 0 sm_90 writes zeros, sm_100 what expert 0 gives."""
        left, right = self.operands(a, b, True, d)
        need(
            grouped_layout.dtype == torch.int32 and grouped_layout.is_contiguous(),
            "grouped_layout is contiguous kInt",
        )
        need(
            grouped_layout.shape == left.shape[:1] and int(grouped_layout.max()) < len(right),
            "an expert for every row",
        )
        # Of a tile a warpgroup of sm_90 takes 64 rows, and skips them where the first is nobody's.
        step = 64 if self.hopper else self.alignment
        for start in range(0, len(left), step):
            rows = slice(start, start + step)
            expert = int(grouped_layout[start // self.alignment * self.alignment])
            skipped = self.hopper and int(grouped_layout[start]) < 0
            d[rows] = 0 if skipped else (left[rows] @ right[max(0, expert)].T).bfloat16()

    def masked(self, a: Pair, b: Pair, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int) -> None:
        """Tiles are whole: to a tile's end rows are written with what a holds there, later ones are left."""
        left, right = self.operands(a, b, True, d)
        need(masked_m.dtype == torch.int32 and masked_m.is_contiguous(), "masked_m is contiguous kInt")
        need(
            masked_m.shape == (len(left),) and len(left) == len(right) == len(d), "num_groups == num_groups_"
        )
        need(type(expected_m) is int and expected_m > 0, "expected_m > 0")
        tile, last = (64 if self.hopper else self.alignment), left.shape[1]
        for group, count in enumerate(masked_m.tolist()):
            written = up(count, tile) * tile
            need(
                0 <= count <= last and (written <= last or group == len(left) - 1), "tiles end in their group"
            )
            d[group, :written] = (left[group, :written] @ right[group].T).bfloat16()


def up(x: int, y: int) -> int:
    return -(-x // y)


def mn_major(sf: torch.Tensor) -> torch.Tensor:
    """smxx_layout.hpp get_mn_major_tma_aligned_tensor: [..., mn, columns] with strides (1, mn rounded up to
    four); given back as it is where it is so. Padding is never written: here it is NaN."""
    *groups, mn, columns = sf.shape
    aligned = up(mn, 4) * 4
    at_home = not groups or sf.stride(0) == aligned * columns
    if at_home and sf.stride(-2) == 1 and sf.stride(-1) == aligned:
        return sf
    room = torch.full((*groups, columns, aligned), -1, dtype=torch.int32).view(sf.dtype)
    return room.mT[..., :mn, :].copy_(sf)


def exponents(sf: torch.Tensor) -> torch.Tensor:
    """smxx_layout.cuh transpose_and_pack_fp32_into_ue8m0: four columns in an int32, the first lowest. The
    kernel traps at what is no power of two."""
    bits = sf.contiguous().view(torch.int32)
    need(bool((bits & -0x7F800001 == 0).all()), "(values[j] & 0x807fffffu) == 0: scales are powers of two")
    packed = torch.zeros(*sf.shape[:-1], up(sf.shape[-1], 4) * 4, dtype=torch.uint8)
    packed[..., : sf.shape[-1]] = (bits >> 23).to(torch.uint8)
    return packed.view(torch.int32)


def values(packed: torch.Tensor) -> torch.Tensor:
    """fp32 of each byte, 2 ** (e - 127), the lowest first; 255 is NaN."""
    each = (packed[..., None] >> torch.arange(0, 32, 8)) & 0xFF
    powers = torch.ldexp(torch.ones(each.shape), each - 127)
    return torch.where(each == 255, torch.nan, powers).flatten(-2)
