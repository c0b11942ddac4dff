"""Older Python, Triton and NumPy: what differs there."""

from types import ModuleType

import pytest
import torch

import kernels
from kernels import triton_runtime
from kernels.op import Unsupported


class Alias:
    """list[int] as Python 3.10 has it, where isinstance(list[int], type)."""

    __class__ = type  # type: ignore[assignment]


def test_an_alias_in_a_module_is_no_implementation():
    module = ModuleType("plain")
    vars(module)["Pairs"] = Alias()
    assert isinstance(module.Pairs, type) and list(kernels._declared_in(module)) == []


@pytest.mark.parametrize(("triton", "numpy", "interprets"), [
    ("3.6.0", "2.5.5", False),
    ("3.6.0", "2.4.0", False),
    ("3.6.0", "2.3.5", True),
    ("3.7.0", "2.5.5", True),
])  # fmt: skip
def test_an_interpreter_that_numpy_refuses_is_unsupported(monkeypatch, triton, numpy, interprets):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_runtime, "version", {"triton": triton, "numpy": numpy}.get)
    if interprets:
        triton_runtime.require_interpreter(torch.device("cpu"))
        return
    reason = rf"^the interpreter of Triton {triton} needs numpy before 2\.4, this is"
    with pytest.raises(Unsupported, match=reason):
        triton_runtime.require_interpreter(torch.device("cpu"))
