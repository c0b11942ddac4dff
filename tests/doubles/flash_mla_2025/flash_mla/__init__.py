"""Double of deepseek-ai/FlashMLA ebf3064 (2025-09-22), the last before the sparse kernels changed
`get_mla_metadata`: it fills its metadata from the lengths at once. Dense MLA decoding on sm_90 alone."""

__version__ = "1.0.0"

from flash_mla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]
