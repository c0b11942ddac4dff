"""torch, which is imported when one of its attributes is first used.

Modules of rows are imported on machines without torch (see kernels/op.py), so they import this name in its
place. Code that a timed call runs imports torch itself, because each look-up here takes 0.2 microseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()
