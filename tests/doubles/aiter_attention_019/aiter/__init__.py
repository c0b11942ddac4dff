"""A double of AITER v0.1.9's MLA decode (2025-12-22), over the arithmetic of the later one's double.

Lend it last, behind `aiter_attention`: it stands first on the path, and what it does not have is found there.
Paths in comments are those of github ROCm/aiter at tag v0.1.9; v0.1.8 differs where they say so.
"""

# ruff: noqa: I001
from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

from .utility import dtypes as dtypes
from .ops.attention import *  # noqa: F403
from . import mla as mla
