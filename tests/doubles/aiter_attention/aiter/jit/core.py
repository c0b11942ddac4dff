"""aiter/jit/core.py: what of it the attention asks for."""

import os


def is_experimental_enabled() -> bool:
    # aiter/jit/core.py:37: any integer but 0 enables, what is no integer does not
    try:
        return int(os.environ.get("AITER_ENABLE_EXPERIMENTAL", "0")) != 0
    except ValueError:
        return False
