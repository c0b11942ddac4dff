"""How this double refuses: what the library checks itself, what it would misread, what is not doubled."""

from __future__ import annotations

import functools
import inspect
import types
import typing

import torch

from ..jit.utils.torch_guard import torch_compile_guard
from ..utility.dtypes import _aiter_dtype_id


class Misread(ValueError):
    """What the library takes without a word and then reads wrongly or out of bounds."""


class NotDoubled(NotImplementedError):
    """What the library may well do and this double does not."""


def check(ok: bool, message: str) -> None:
    """AITER_CHECK and TORCH_CHECK: the library's own refusal."""
    if not ok:
        raise RuntimeError(message)


def sure(ok: bool, message: str) -> None:
    if not ok:
        raise Misread(message)


def doubled(ok: bool, message: str) -> None:
    if not ok:
        raise NotDoubled(f"the double does not do this: {message}")


def indices(name: str, tensor: torch.Tensor, at_least: int = 0) -> list[int]:
    """An int32 array that a kernel reads through its bare pointer, as Python numbers."""
    sure(tensor.dtype == torch.int32, f"{name} is read as int32, not as {tensor.dtype}")
    sure(tensor.dim() == 1 and tensor.is_contiguous(), f"{name} is read as one contiguous row")
    sure(tensor.numel() >= at_least, f"{name} has {tensor.numel()} entries, {at_least} are read")
    return tensor.tolist()


def scalar(name: str, tensor: torch.Tensor | None) -> float:
    """A per-tensor scale that a kernel reads as the float at its pointer."""
    sure(tensor is not None, f"{name} is read through its pointer: None is a null pointer")
    sure(tensor.dtype == torch.float32 and tensor.numel() == 1, f"{name} is read as one float32")
    return float(tensor)


def compiled(ffi: str, at_tensors: bool = False):
    """An operator that refuses arguments of another type than the hint's, as aiter/jit/core.py compile_ops
    makes it: torch_compile_guard is outermost (core.py:1676 and :1962).

    `ctypes` takes ints for bools and floats (`_check_args_before_convert`); `pybind` wants the very type
    (`check_args`). Both turn tensors into aiter_tensor_t, which knows AITER's dtypes alone, but for a
    `pybind` op without `develop`, which takes `at_tensors`.
    """
    wider = {bool: (bool, int), float: (float, int)} if ffi == "ctypes" else {}

    def around(function):
        signature, hints = inspect.signature(function), typing.get_type_hints(function)

        @functools.wraps(function)
        def caller(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, value in bound.arguments.items():
                hint = hints[name]
                kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
                allowed = tuple(k for kind in kinds for k in wider.get(kind, (kind,)))
                if not isinstance(value, allowed):
                    raise TypeError(f"{function.__name__}: {name} needs to be {hint} but got {type(value)}")
                if isinstance(value, torch.Tensor) and not at_tensors:
                    _aiter_dtype_id(value.dtype)
            return function(*args, **kwargs)

        return torch_compile_guard(caller)

    return around
