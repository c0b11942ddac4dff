"""A double of AMD's AITER at commit e404860: the attention that vLLM and SGLang serve DeepSeek-R1 with.

As there (`aiter/__init__.py`), `dtypes` is bound before the modules that need it, the ops are re-exported
here and `mla` is a submodule. Paths in comments are those of github ROCm/aiter at that commit.
"""

# ruff: noqa: I001
from .utility import dtypes as dtypes
from .ops.attention import *  # noqa: F403
from .ops.enum import *  # noqa: F403
from .ops.mha import *  # noqa: F403
from . import mla as mla
