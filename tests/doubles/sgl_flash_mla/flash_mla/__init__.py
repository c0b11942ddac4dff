"""Double of sgl-flash-mla 1.0.0 (flash_mla/__init__.py), SGLang's fork of FlashMLA: dense decoding alone.

Its C++ is not in the wheel: bf16 is read from deepseek-ai/FlashMLA 9241ae3, FP8 from what
`double_arithmetic.flash_mla_fp8` names. Untested on hardware.
"""

__version__ = "1.0.0"

from flash_mla.flash_mla_interface import (
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    get_mla_metadata,
    has_legacy,
)

__all__ = ["flash_mla_with_kvcache", "get_mla_decoding_metadata", "get_mla_metadata", "has_legacy"]
