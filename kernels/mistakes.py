"""What `kernels/<op>/mistakes.py` lists: kernels that are wrong in one way each, in plain torch. Tests plant
them (`MISTAKES`), and the diagnosis of a wrong output compares it with them (`answers`). Functions here round
values to fewer bits, as kernels do; they take and return fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU_ELEMENTS, GPU_ELEMENTS = 6e8, 1e11  # elements that a processor computes in a few seconds
MOST_OPERATIONS = 100_000  # operations that torch launches in a few seconds


class TooMuchWork(Exception):
    """`Work` is at its limit."""


class Work(TorchFunctionMode):
    """Limits what torch computes under it, by elements and operations, so that it ends at the same place
    however busy the machine is."""

    done = 0.0  # the share of the limit that is used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            if not made._is_view():
                self.done += made.numel() / (CPU_ELEMENTS if made.is_cpu else GPU_ELEMENTS)
            self.done += 1 / MOST_OPERATIONS
        if self.done > 1:
            raise TooMuchWork
        return made


Compute = Callable[[Any, torch.Tensor], torch.Tensor]
"""(operands, right output) -> wrong output, in the op's shape and dtype, on the operands' device. It may
change and return the right output, as many kernels are wrong in one place only."""


Answers = Mapping[str, Callable[[], torch.Tensor]]
"""By their names, what kernels that are wrong everywhere give for some rows and columns of the output, [rows,
..., columns]. A mistake that these operands do not allow raises an exception."""


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
    """Whether it rounds to bf16 toward zero. The tolerance depends on this, too."""


def listed(
    computes: Mapping[str, Compute], boundary: str = "core", activations: str = "bf16", form: str = "{}"
) -> tuple[Mistake, ...]:
    """The mistakes of a table by name. form: makes the full name"""
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


def kept(bits: int, x: torch.Tensor) -> torch.Tensor:
    """Truncates to so many bits of the significand, of which the leading one counts."""
    drop = 24 - bits
    return (x.contiguous().view(torch.int32) >> drop << drop).view(torch.float32)


def fp8(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest. What is too large becomes the largest value of the format."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).float()


def fp8_truncated(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Rounds toward zero."""
    format = torch.finfo(dtype)
    near = fp8(dtype, x)
    lower = fp8(dtype, near - near.abs() * 2.0**-4 * near.sign())
    step = format.smallest_normal / 8
    normal = torch.where(near.abs() > x.abs(), lower, near)
    return torch.where(x.abs() < format.smallest_normal, (x / step).trunc() * step, normal)
