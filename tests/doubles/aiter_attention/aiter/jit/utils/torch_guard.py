"""aiter/jit/utils/torch_guard.py: entry points become operators `torch.ops.aiter.NAME`.

As in the real one, what a module then holds is a bare `wrapper_custom(*args, **kwargs)` (torch_guard.py:292;
v0.1.8 and v0.1.9 alike, :277): names, defaults and types are in the operator's schema and in the typed `def`
below the decorator, and torch itself refuses what does not fit the schema.
"""

import inspect
import typing

import torch
from torch.library import Library

_TYPES = {int: "SymInt", float: "float", bool: "bool", torch.dtype: "ScalarType"}
_TYPES |= {kind | None: f"{name}?" for kind, name in _TYPES.items()} | {torch.Generator | None: "Generator?"}


def torch_compile_guard(func):
    name, schema = func.__name__, generate_schema(func)
    # Not in the real one: an operator outlives the module, so it calls what was decorated last, and a
    # second version of the library in one process defines it anew.
    latest = torch.ops.aiter.__dict__.setdefault("_double_functions", {})
    latest[name] = func

    def wrapper_custom(*args, **kwargs):
        return getattr(torch.ops.aiter, name)(*args, **kwargs)

    held = latest.get(f"library of {name}")
    if held is None or held[1] != schema:
        if held is not None:
            held[0]._destroy()
            torch.ops.aiter.__dict__.pop(name, None)
        library = Library("aiter", "FRAGMENT")
        latest[f"library of {name}"] = library, schema  # kept alive as long as the operator
        library.define(name + schema)
        library.impl(name, lambda *args, **kwargs: latest[name](*args, **kwargs), dispatch_key="CPU")
    return wrapper_custom


def generate_schema(func) -> str:
    """All tensors may be written to (mutates_args="unknown")."""
    hints, parts = typing.get_type_hints(func), []
    for i, (name, parameter) in enumerate(inspect.signature(func).parameters.items()):
        hint = hints[name]
        tensors = {torch.Tensor: f"Tensor(a{i}!)", torch.Tensor | None: f"Tensor(a{i}!)?"}
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default}"
        parts.append(f"{(_TYPES | tensors)[hint]} {name}{default}")
    returned = ", ".join(["Tensor"] * len(typing.get_args(hints["return"])))
    return f"({', '.join(parts)}) -> ({returned})"
