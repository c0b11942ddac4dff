"""Implementations whose verdicts are known, for KERNEL_BENCH_PLUGINS on a GPU: the baseline under another
name, and the baseline with a sleep of the device after each call, which makes it slower by a known share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.block_scale_gemm.providers.torch_eager import bf16
from kernels.op import Prepared, Unsupported

CYCLES: dict[Any, int] = {}
"""(share, sizes, boundary) -> cycles of the sleep. They are measured once, as that takes half a second."""


class Again(bf16):
    """torch.bf16 itself. Its verdict against torch.bf16 has to be `same`."""

    name = "control.again"
    op = "block_scale_gemm"


class Handicapped(bf16):
    """torch.bf16, then a sleep of 2 % of its time. Its verdict has to be `slower`."""

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
    """The cycles of a sleep of that share of a call. Raises Unsupported if that time is too short."""

    def seconds(work: Callable[[], object]) -> float:
        """The time of a call: the shortest of 5 series of 20 calls, divided by 20."""
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(50_000_000)  # some 30 ms, in which all calls are launched
            start.record()
            for _ in range(20):
                work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / 20)
        return min(times)

    seconds(call)  # a warm-up
    # A sleep has a fixed cost, so two sleeps give the cost and the time of a cycle.
    few, many = 10_000, 1_000_000
    short_s = seconds(lambda: torch.cuda._sleep(few))
    long_s = seconds(lambda: torch.cuda._sleep(many))
    cycle_s = (long_s - short_s) / (many - few)
    fixed_s = short_s - few * cycle_s
    cycles = int((share * seconds(call) - fixed_s) / cycle_s)
    if cycles < 1:
        raise Unsupported(f"{share:.0%} of a call is less than a device sleep's {fixed_s * 1e6:.1f} us")
    return cycles
