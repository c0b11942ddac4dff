"""torch.ops.flash_attn_3: hopper/flash_api.cpp at 0251105."""

from double_arithmetic.flash_attention_3 import fwd
from double_arithmetic.flash_attention_3_sorted import get_scheduler_metadata, reached

__all__ = ["fwd", "get_scheduler_metadata", "reached"]
