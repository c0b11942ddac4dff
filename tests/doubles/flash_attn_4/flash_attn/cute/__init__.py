"""Double of flash-attn-4 4.0.0b36 (flash_attn/cute/__init__.py): varlen alone.

The wheel brings `flash_attn/cute/` and no `flash_attn/__init__.py`. It looks for its version under "fa4",
while its distribution is called flash-attn-4: `__version__` is "0.0.0".
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fa4")
except PackageNotFoundError:
    __version__ = "0.0.0"

from .interface import flash_attn_varlen_func as flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func"]
