"""aiter/jit/utils/torch_guard.py: entry points become operators `torch.ops.aiter.NAME`.

As in the real one, what a module then holds is a bare `wrapper_custom(*args, **kwargs)` (torch_guard.py:292):
names, defaults and types are in the operator's schema, and torch itself refuses what does not fit it.
"""

import inspect
import typing

import torch
from torch.library import Library

_TYPES = {int: "SymInt", float: "float", bool: "bool", torch.Generator | None: "Generator?"}


def torch_compile_guard(func):
    name = func.__name__
    # Not in the real one: an operator outlives the module, so it calls what was decorated last.
    latest = torch.ops.aiter.__dict__.setdefault("_double_functions", {})
    latest[name] = func

    def wrapper_custom(*args, **kwargs):
        return getattr(torch.ops.aiter, name)(*args, **kwargs)

    if not hasattr(torch.ops.aiter, name):
        library = Library("aiter", "FRAGMENT")
        latest[f"library of {name}"] = library  # kept alive as long as the operator
        library.define(name + generate_schema(func))
        library.impl(name, lambda *args, **kwargs: latest[name](*args, **kwargs), dispatch_key="CPU")
    return wrapper_custom


def generate_schema(func) -> str:
    """MANUAL_SCHEMA_OPS: all tensors may be written to. Of four tensors, as these return."""
    hints, parts = typing.get_type_hints(func), []
    for i, (name, parameter) in enumerate(inspect.signature(func).parameters.items()):
        hint = hints[name]
        tensors = {torch.Tensor: f"Tensor(a{i}!)", torch.Tensor | None: f"Tensor(a{i}!)?"}
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default}"
        parts.append(f"{(_TYPES | tensors)[hint]} {name}{default}")
    return f"({', '.join(parts)}) -> (Tensor, Tensor, Tensor, Tensor)"
