"""aiter/ops/triton/__init__.py: the flat module names of old still lead to the new places."""

import importlib

_BACKWARD_COMPAT_MAP = {"mha": "attention.mha", "mla_decode": "attention.mla_decode"}


def __getattr__(name):
    if name in _BACKWARD_COMPAT_MAP:
        return importlib.import_module(f"aiter.ops.triton.{name}")
    raise AttributeError(f"module 'aiter.ops.triton' has no attribute '{name}'")
