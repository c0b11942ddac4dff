"""srt/layers/deep_gemm_wrapper of SGLang 0.5.23: DeepGEMM as SGLang calls it. The real functions compile
every M up to 16384 for a new shape first (compile_utils.py:150), unless SGLANG_JIT_DEEPGEMM_PRECOMPILE is
false."""

from contextlib import contextmanager

import deep_gemm
import torch

from ...._kernel import scale_ue8m0

# configurer.py
DEEPGEMM_BLACKWELL = DEEPGEMM_SCALE_UE8M0 = scale_ue8m0()
DEEPGEMM_NEED_TMA_ALIGNED_SCALES = not DEEPGEMM_SCALE_UE8M0
ENABLE_JIT_DEEPGEMM = True

get_mn_major_tma_aligned_tensor = deep_gemm.get_mn_major_tma_aligned_tensor


def _recipes(recipe_a, recipe_b):
    given = {"recipe_a": recipe_a, "recipe_b": recipe_b}
    return {name: recipe for name, recipe in given.items() if recipe is not None}


def grouped_gemm_nt_f8f8bf16_masked(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    overlap_args=None,
    max_block_n: int = 256,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
):
    """entrypoint.py:48."""
    if overlap_args is not None:
        raise NotImplementedError("the double of SGLang does not cover overlap_args")
    return deep_gemm.fp8_m_grouped_gemm_nt_masked(
        lhs, rhs, out, masked_m, expected_m, **_recipes(recipe_a, recipe_b)
    )


def grouped_gemm_nt_f8f8bf16_contig(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    m_indices: torch.Tensor,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
):
    """entrypoint.py:132."""
    if lhs[0].shape[0] == 0:
        return
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, m_indices, **_recipes(recipe_a, recipe_b))


def gemm_nt_f8f8bf16(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
):
    """entrypoint.py:219."""
    deep_gemm.fp8_gemm_nt(lhs, rhs, out, **({} if recipe is None else {"recipe": recipe}))


def get_contiguous_layout_alignment(expected_m: int, num_groups: int) -> int:
    """entrypoint.py:173."""
    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    per_group = -(-expected_m // num_groups)
    candidate = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(per_group)
    return candidate if 0 < candidate <= alignment else alignment


@contextmanager
def contiguous_layout_alignment_scope(alignment: int | None):
    """entrypoint.py:198."""
    if alignment is None:
        yield
        return
    previous = deep_gemm.get_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    try:
        yield
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(previous)
