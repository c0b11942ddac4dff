"""The name of old, through aiter/ops/triton/__init__.py's _BACKWARD_COMPAT_MAP."""

import sys

from .attention import mha

sys.modules[__name__] = mha
