"""What `kernels/<op>/mistakes.py` lists: kernels that are wrong in one way each, in plain torch.

Tests check that the judge refuses each of them (`MISTAKES` of that module). The diagnosis of a wrong output
compares it with their outputs (`answers` of that module). The functions at the end round values to fewer
bits, as kernels do. They take and return fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Elements that a processor computes, and operations that torch launches, in a few seconds.
CPU_ELEMENTS = 6e8
GPU_ELEMENTS = 1e11
MOST_OPERATIONS = 100_000


class TooMuchWork(Exception):
    """The limit of a `Work` is reached."""


class Work(TorchFunctionMode):
    """Limits the work of a diagnosis: a context in which torch computes so many elements and operations, then
    raises TooMuchWork. A limit of time would end a diagnosis elsewhere whenever the machine is busy."""

    done = 0.0  # the share of the limit that is used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            if not result._is_view():
                self.done += result.numel() / (CPU_ELEMENTS if result.is_cpu else GPU_ELEMENTS)
            self.done += 1 / MOST_OPERATIONS
        if self.done > 1:
            raise TooMuchWork
        return result


Compute = Callable[[Any, torch.Tensor], torch.Tensor]
"""(operands, right output) -> wrong output, in the op's shape and dtype, on the operands' device. It may
overwrite the right output and return that, as many kernels are wrong in one place only."""

Answers = Mapping[str, Callable[[], torch.Tensor]]
"""By the name of a mistake, a function that returns what a kernel outputs if it makes the mistake everywhere:
some rows and columns, [rows, ..., columns]. It raises where operands do not allow the mistake."""


@dataclass(frozen=True)
class Mistake:
    """A kernel that is wrong in one way."""

    name: str
    """Says what is wrong; unique within the op."""
    compute: Compute
    boundary: str = "core"
    activations: str = "bf16"
    """The format that it rounds activations to, bf16 or fp8. The tolerance depends on it."""
    truncates: bool = False
    """Whether it rounds to bf16 toward zero. The tolerance depends on this as well."""


def listed(
    computes: Mapping[str, Compute], boundary: str = "core", activations: str = "bf16", form: str = "{}"
) -> tuple[Mistake, ...]:
    """A Mistake for each function. form: its name, in which {} stands for the key in `computes`"""
    return tuple(
        Mistake(form.format(name), compute, boundary, activations) for name, compute in computes.items()
    )


def put(x: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    """Returns a copy of x with another value at an index."""
    x = x.clone()
    x[at] = value
    return x


Round = Callable[[torch.Tensor], torch.Tensor]

E4M3, E4M3FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
OTHER_FP8 = {E4M3: E4M3FNUZ, E4M3FNUZ: E4M3}
"""For each format, the one of other machines, in which the same bits mean about half or twice the value."""


def exact(x: torch.Tensor) -> torch.Tensor:
    return x


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def fp16(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def truncated_to(bits: int, x: torch.Tensor) -> torch.Tensor:
    """Truncates to so many bits of the significand, including the leading one. fp32 has 24."""
    dropped = 24 - bits
    return (x.contiguous().view(torch.int32) >> dropped << dropped).view(torch.float32)


def fp8(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest value of an FP8 dtype. Larger values become the largest one."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).float()


def fp8_truncated(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Rounds toward zero to an FP8 dtype with 3 mantissa bits."""
    format = torch.finfo(dtype)
    nearest = fp8(dtype, x)
    # With 3 mantissa bits a value is 8 to 15 steps. A sixteenth of it is at least half a step and less than
    # one, so a value that is smaller by it rounds to the next smaller one.
    next_smaller = fp8(dtype, nearest - nearest.abs() * 2.0**-4 * nearest.sign())
    normal = torch.where(nearest.abs() > x.abs(), next_smaller, nearest)
    step = format.smallest_normal / 8  # between subnormal values
    return torch.where(x.abs() < format.smallest_normal, (x / step).trunc() * step, normal)
