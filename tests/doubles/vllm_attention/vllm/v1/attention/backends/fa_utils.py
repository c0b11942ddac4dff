"""vllm/v1/attention/backends/fa_utils.py of vLLM 0.33.0, as the MLA backends import it."""

import os

from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata, is_fa_version_supported

__all__ = [
    "flash_attn_supports_mla",
    "flash_attn_varlen_func",
    "get_flash_attn_version",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]


def get_flash_attn_version(head_size: int | None = None, head_size_v: int | None = None) -> int | None:
    """3 on Hopper, 4 on compute capability 10.x up to heads of 128 and for (192, 128), else 2."""
    arch = os.environ.get("DOUBLE_ARCH", "sm_90")
    if arch == "sm_90":
        return 4 if head_size is not None and head_size > 256 else 3
    wide = head_size is not None and head_size > 128 and (head_size, head_size_v) != (192, 128)
    return 4 if arch in ("sm_100", "sm_103") and not wide else 2


def flash_attn_supports_mla() -> bool:
    return is_fa_version_supported(3)
