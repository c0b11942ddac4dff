"""Double of deepseek-ai/FlashMLA 9241ae3 (2026-04-29): dense MLA decoding on sm_90 alone.

Not doubled: the sparse kernels and the sm_100 dense prefill.
"""

__version__ = "1.0.0"

from flash_mla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]
