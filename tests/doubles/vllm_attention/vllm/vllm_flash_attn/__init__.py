"""vllm/vllm_flash_attn/__init__.py of vLLM 0.33.0."""

from vllm.vllm_flash_attn.flash_attn_interface import (
    fa_version_unsupported_reason,
    flash_attn_varlen_func,
    get_scheduler_metadata,
    is_fa_version_supported,
)

__all__ = [
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]
