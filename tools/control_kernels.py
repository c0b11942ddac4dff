"""Implementations whose verdicts are known, for KERNEL_BENCH_PLUGINS on a GPU: the baseline under another
name, and the baseline with a sleep of the device after each call, which makes it slower by a known share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kernels.block_scale_gemm.providers.torch_eager import bf16
from kernels.op import Prepared, Unsupported

CYCLES: dict[Any, int] = {}
"""Share and sizes -> cycles of the sleep. Measuring takes half a second and is done once for all blocks."""


class Again(bf16):
    """torch.bf16 itself."""

    name = "control.again"
    op = "block_scale_gemm"


class Handicapped(bf16):
    """torch.bf16, then a sleep of 2 % of its time."""

    name = "control.handicapped"
    op = "block_scale_gemm"
    share = 0.02

    def prepare(self, operands: Any, out: torch.Tensor) -> Prepared:
        if out.device.type == "cpu":
            raise Unsupported("a sleep of the device makes it slower: needs a GPU")
        prepared = super().prepare(operands, out)
        call = prepared.call
        key = (self.share, operands.sizes, operands.boundary)
        if key not in CYCLES:
            CYCLES[key] = sleep_cycles(call, self.share)
        cycles = CYCLES[key]

        def slower() -> None:
            call()
            torch.cuda._sleep(cycles)

        prepared.call = slower  # type: ignore[method-assign]
        return prepared


def sleep_cycles(call: Callable[[], object], share: float) -> int:
    """The cycles of a sleep that lasts the given share of a call. Raises Unsupported if that is too short."""

    def seconds(work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        start.record()
        for _ in range(20):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / 20

    seconds(call)
    # A sleep has a fixed cost, so two sleeps give the slope and the intercept of its time.
    sleeps = [functools.partial(torch.cuda._sleep, cycles) for cycles in (10_000, 1_000_000)]
    short, long, called = (min(seconds(work) for _ in range(5)) for work in (*sleeps, call))
    slope = (long - short) / 990_000
    start = short - 10_000 * slope
    cycles = int((share * called - start) / slope)
    if cycles < 1:
        raise Unsupported(f"{share:.0%} of a call is less than a device sleep's {start * 1e6:.1f} us")
    return cycles
