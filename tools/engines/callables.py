"""The callables that every engine ranks: three kernels, one of them again and 2 % slower.

Each of the three is in turn the baseline of a ranking. Its copy is prepared on buffers of its own, so the two
are equal by what they do. The slower one is the control kernel's: it spins for 2 % of what its own call has
just taken, so each call takes 1.02 times as long, whatever clock or neighbours were; 2 % more rows would not,
as products come in tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kernels
from kernels.op import OPS
from kernels.operands import Operands, Seeds
from tools.control_kernels import HANDICAP, slower_on_cpu

Call = Callable[[], Any]
VARIABLE = "COMPARED_CALLABLES"
"""Of the environment, with their names as JSON, for engines that have a script started."""
AGAIN, SLOWER = "again", f"+{100 * HANDICAP:g}%"


@dataclass(frozen=True)
class Kernel:
    """Sizes keep a call near a millisecond on two cores, and no kernel far slower than another."""

    op: str
    implementation: str
    sizes: tuple[tuple[str, int | str], ...]

    def __str__(self) -> str:
        return " ".join([self.op, self.implementation, *(f"{name}={size}" for name, size in self.sizes)])


KERNELS = {
    "gemm": Kernel("block_scale_gemm", "torch.bf16", (("m", 16), ("n", 1024), ("k", 2048))),
    "naive": Kernel("block_scale_gemm", "torch.naive", (("m", 64), ("n", 256), ("k", 1024))),
    "attention": Kernel("mla_decode", "torch.sdpa", (("batch", 2), ("ctx", "1024"), ("heads", 16))),
}


def callables(baseline: str, quick: bool = False) -> list[str]:
    """Names of those of a ranking, the baseline first; quick: only those whose order is known."""
    others = [] if quick else [name for name in KERNELS if name != baseline]
    return [baseline, f"{baseline} {AGAIN}", f"{baseline} {SLOWER}", *others]


def prepare(name: str) -> Call:
    """Makes the named callable on fresh buffers; it was called once."""
    import torch

    kernel, _, variant = name.partition(" ")
    chosen = KERNELS[kernel]
    op = OPS[chosen.op]
    implementation = next(i for i in kernels.implementations(op.name) if i.name == chosen.implementation)
    out = op.empty_output(op.sizes(dict(chosen.sizes)), "cpu")
    prepared = implementation.prepare(_operands(kernel).copy(), out)
    prepared.call()
    assert torch.isfinite(prepared.result()).all()
    return slower_on_cpu(prepared.call) if variant == SLOWER else prepared.call


@functools.cache
def _operands(kernel: str) -> Operands:
    op = OPS[KERNELS[kernel].op]
    return op.make(op.sizes(dict(KERNELS[kernel].sizes)), Seeds(), "cpu")
