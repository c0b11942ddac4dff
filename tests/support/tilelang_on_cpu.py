"""TileLang's own compiler in place of a GPU: what it compiles of the rows' programs for this CPU runs.

Its target `c` knows no memory but a thread's own, no parallel loops, and no types below fp32 (src/cpu of
TileLang 0.1.15): so all memory is local, all loops are serial, and values are widened, exactly.
T.gemm, copies with their bounds, reductions and control flow are lowered from the same text. It tells nothing
of layouts, of pipelines, of what lies where in shared memory, and of rounding inside.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.vendor import TileLang


class CpuKernel:
    """Takes what the device's kernel takes, of which the last is the output."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, *given: Any) -> None:
        taken = [widened(value) for value in given]
        self.kernel(*taken)
        if taken[-1] is not given[-1]:
            given[-1].copy_(taken[-1])


def widened(value: Any) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float32
    return torch.empty_like(value, dtype=torch.float32).copy_(value) if narrow else value


def wide(dtype: str) -> str:
    return "float32" if dtype.startswith(("bfloat16", "float8")) else dtype


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    import tilelang
    import tilelang.language as language
    from tilelang import tvm

    tensor, local, compiling = language.Tensor, language.alloc_local, tilelang.compile

    def compiled(func: Any) -> CpuKernel:
        with tvm.target.Target("c"):
            return CpuKernel(compiling(func, target="c", target_host="c", execution_backend="cython"))

    def alloc(shape: tuple[int, ...], dtype: str) -> Any:
        return local(shape, wide(dtype))

    class WideTensor:
        def __call__(self, shape: Any, dtype: str) -> Any:
            return tensor(shape, wide(dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "Tensor", WideTensor())
        patch.setattr(language, "alloc_shared", alloc)
        patch.setattr(language, "alloc_fragment", alloc)
        patch.setattr(language, "Parallel", language.grid)
        patch.setattr(tilelang, "compile", compiled)
        TileLang.compiled.cache_clear()
        yield
        TileLang.compiled.cache_clear()
