"""vllm/utils/deep_gemm.py of vLLM 0.33.0: DeepGEMM as vLLM calls it. An installed `deep_gemm` comes before
the copy in vllm.third_party (line 185), which is not doubled."""

import contextlib
import functools
import importlib
import os
from enum import Enum

import torch

from .._kernel import capability


class DeepGemmQuantScaleFMT(Enum):
    """Line 57."""

    FLOAT32 = 0
    FLOAT32_CEIL_UE8M0 = 1
    UE8M0 = 2

    @classmethod
    def from_oracle(cls) -> "DeepGemmQuantScaleFMT":
        if not is_deep_gemm_e8m0_used():
            return cls.FLOAT32
        return cls.UE8M0 if capability() // 10 in (10, 12) else cls.FLOAT32_CEIL_UE8M0


def _is_set(name: str) -> bool:
    return bool(int(os.getenv(name, "1")))  # vllm/envs.py:1600, 1606


@functools.cache
def _import_deep_gemm():
    try:
        return importlib.import_module("deep_gemm")
    except ImportError:
        return None


def _deep_gemm():
    module = _import_deep_gemm()
    if module is None:
        raise RuntimeError("DeepGEMM backend is unavailable in the current vLLM environment, ...")
    return module


def is_deep_gemm_supported() -> bool:
    """Line 113; the devices are those of vllm/platforms/cuda.py:691."""
    known = capability() == 90 or capability() // 10 in (10, 12)
    return known and _is_set("VLLM_USE_DEEP_GEMM") and _import_deep_gemm() is not None


def is_deep_gemm_e8m0_used() -> bool:
    """Line 122: True by default, on Hopper too."""
    return is_deep_gemm_supported() and _is_set("VLLM_USE_DEEP_GEMM_E8M0")


def get_num_sms() -> int:
    return int(_deep_gemm().get_num_sms())


def set_num_sms(num_sms: int) -> None:
    _deep_gemm().set_num_sms(num_sms)


def get_mk_alignment_for_contiguous_layout() -> list[int]:
    """Line 363: a list, of the alignment twice."""
    size = _deep_gemm().get_mk_alignment_for_contiguous_layout()
    return [size, size]


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """Line 371."""
    theoretical = _deep_gemm().get_theoretical_mk_alignment_for_contiguous_layout
    if num_groups is None:
        return theoretical(expected_m)
    if num_groups <= 0:
        raise ValueError(f"num_groups must be positive, got {num_groups}")
    try:
        return theoretical(expected_m, num_groups)
    except TypeError:
        return theoretical(None if expected_m is None else -(-expected_m // num_groups))


def set_mk_alignment_for_contiguous_layout(value: int) -> None:
    _deep_gemm().set_mk_alignment_for_contiguous_layout(value)


@contextlib.contextmanager
def mk_alignment_scope(value: int):
    """Line 420."""
    previous = get_mk_alignment_for_contiguous_layout()[0]
    set_mk_alignment_for_contiguous_layout(value)
    try:
        yield
    finally:
        set_mk_alignment_for_contiguous_layout(previous)


def get_col_major_tma_aligned_tensor(x: torch.Tensor) -> torch.Tensor:
    return _deep_gemm().get_mn_major_tma_aligned_tensor(x)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(x: torch.Tensor) -> torch.Tensor:
    return _deep_gemm().get_mn_major_tma_aligned_packed_ue8m0_tensor(x)


def get_tma_aligned_size(x: int, element_size: int) -> int:
    per = 16 // element_size
    return -(-x // per) * per


def fp8_gemm_nt(*args, **kwargs):
    """Line 541: disable_ue8m0_cast is set here."""
    used = kwargs.pop("is_deep_gemm_e8m0_used", None)
    used = is_deep_gemm_e8m0_used() if used is None else used
    return _deep_gemm().fp8_gemm_nt(*args, disable_ue8m0_cast=not used, **kwargs)


def m_grouped_fp8_gemm_nt_contiguous(*args, **kwargs):
    """Line 560."""
    call = _deep_gemm().m_grouped_fp8_gemm_nt_contiguous
    return call(*args, disable_ue8m0_cast=not is_deep_gemm_e8m0_used(), **kwargs)


def fp8_m_grouped_gemm_nt_masked(*args, **kwargs):
    """Line 578; DeepGEMM 2.8 knows only the first name."""
    module = _deep_gemm()
    call = getattr(module, "m_grouped_fp8_gemm_nt_masked", None) or module.fp8_m_grouped_gemm_nt_masked
    return call(*args, disable_ue8m0_cast=not is_deep_gemm_e8m0_used(), **kwargs)


def transform_sf_into_required_layout(*args, **kwargs):
    """Line 587."""
    call = _deep_gemm().transform_sf_into_required_layout
    return call(*args, disable_ue8m0_cast=not is_deep_gemm_e8m0_used(), **kwargs)


def per_block_cast_to_fp8(
    x: torch.Tensor, block_size: tuple[int, int] | list[int] = (128, 128), use_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Line 1027."""
    assert x.dim() == 2
    (m, n), (block_m, block_n) = x.shape, block_size
    padded = torch.zeros(
        -(-m // block_m) * block_m, -(-n // block_n) * block_n, dtype=x.dtype, device=x.device
    )
    padded[:m, :n] = x
    blocks = padded.view(-1, block_m, padded.shape[1] // block_n, block_n)
    scale = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    if use_ue8m0:
        scale = torch.pow(2.0, torch.ceil(torch.log2(scale.abs())))
    values = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn)
    return values.view_as(padded)[:m, :n].contiguous(), scale.view(blocks.shape[0], blocks.shape[2])
