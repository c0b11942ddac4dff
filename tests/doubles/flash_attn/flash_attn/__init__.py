"""Double of Dao-AILab/flash-attention 0251105 (2026-08-15), package flash_attn (FA2): varlen alone."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # so that FA4's flash_attn.cute may stand beside it

__version__ = "2.8.4"

from flash_attn.flash_attn_interface import flash_attn_varlen_func as flash_attn_varlen_func
