"""Double of Dao-AILab/flash-attention 0251105 (fa4-v4.0.0.beta27, 2026-08-15): varlen alone.

The wheel brings `flash_attn/cute/` and no `flash_attn/__init__.py` (flash_attn/cute/pyproject.toml). It looks
for its version under "fa4", while its distribution is called flash-attn-4: `__version__` is "0.0.0".
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fa4")
except PackageNotFoundError:
    __version__ = "0.0.0"

from .interface import flash_attn_varlen_func as flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func"]
