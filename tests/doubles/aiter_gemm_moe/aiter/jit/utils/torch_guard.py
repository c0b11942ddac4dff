"""aiter/jit/utils/torch_guard.py: entry points become operators `torch.ops.aiter.NAME`.

As in the real one, what a module then holds is a bare `wrapper_custom(*args, **kwargs)` without
functools.wraps (torch_guard.py:292), so `inspect.signature` tells nothing; names, defaults and types are in
the operator's schema, `torch.ops.aiter.NAME.default._schema`. Torch itself refuses unknown names and wrong
types.
"""

import inspect

import torch
from torch.library import Library, infer_schema


def torch_compile_guard(mutates_args="unknown", device="cpu", calling_func_=None, gen_fake=None):
    def decorator(func):
        calling_func = calling_func_ if calling_func_ is not None else func
        name = calling_func.__name__
        # Not in the real one: an operator outlives the module, so it calls what was decorated last.
        latest = torch.ops.aiter.__dict__.setdefault("_double_functions", {})
        latest[name] = func

        first = next(iter(inspect.signature(calling_func).parameters.values()), None)
        has_tensor = first is not None and first.annotation is torch.Tensor  # torch_guard.py:262

        def wrapper_custom(*args, **kwargs):
            operator = getattr(torch.ops.aiter, name)
            if not has_tensor:  # torch_guard.py:270 puts a dummy tensor first
                args = (torch.empty(1, device="cpu"), *args)
            return operator(*args, **kwargs)

        if not hasattr(torch.ops.aiter, name):
            library = Library("aiter", "FRAGMENT")
            latest[f"library of {name}"] = library  # kept alive as long as the operator
            schema = infer_schema(calling_func, mutates_args=mutates_args)
            if not has_tensor:
                schema = "(Tensor dummy, " + schema[1:]

            def implementation(*args, **kwargs):
                return latest[name](*(args if has_tensor else args[1:]), **kwargs)

            library.define(name + schema)
            library.impl(name, implementation, dispatch_key="CPU")
        return wrapper_custom

    return decorator
