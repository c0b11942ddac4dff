"""Contenders whose verdicts are known, for KERNEL_BENCH_PLUGINS: the baseline under another name, and the
baseline made slower by a known share."""

from __future__ import annotations

import time
from typing import Any

from kernels.block_scale_gemm.providers.torch_eager import Bf16Gemm
from kernels.op import Prepared, Unsupported

HANDICAP = 0.02
CYCLES: dict[Any, int] = {}


class Again(Bf16Gemm):
    """torch.bf16 itself."""

    name = "control.again"
    op = "block_scale_gemm"


class Handicapped(Bf16Gemm):
    """torch.bf16, and then 2 % of its time once more."""

    name = "control.handicapped"
    op = "block_scale_gemm"
    share = HANDICAP

    def prepare(self, operands: Any, out: Any) -> Prepared:
        prepared = super().prepare(operands, out)
        call = prepared.call
        if out.device.type == "cpu":
            slower = slower_on_cpu(call, self.share)
        else:
            # Measured once for all sets of operands and all blocks: it takes half a second.
            key = (self.share, operands.sizes, operands.boundary)
            cycles = CYCLES[key] = CYCLES.get(key) or sleep_cycles(call, self.share)
            slower = slower_on_gpu(call, cycles)
        prepared.call = slower  # type: ignore[method-assign]
        return prepared


class HalfAgain(Handicapped):
    """torch.bf16, and then half of its time once more."""

    name = "control.half_again"
    op = "block_scale_gemm"
    share = 0.5


def slower_on_cpu(call: Any, share: float = HANDICAP) -> Any:
    """Spins for the share of what this very call took, so that the handicap is exact whatever the clock."""

    def slower() -> None:
        started = time.perf_counter()
        call()
        until = time.perf_counter()
        until += share * (until - started)
        while time.perf_counter() < until:
            pass

    return slower


def slower_on_gpu(call: Any, cycles: int) -> Any:
    """Lets the device sleep for so many cycles after the call."""
    import torch

    def slower() -> None:
        call()
        torch.cuda._sleep(cycles)

    return slower


def sleep_cycles(call: Any, share: float) -> int:
    """Of a sleep that lasts a share of what a call takes; raises Unsupported where that is too short."""
    import torch

    def seconds(work: Any, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    def sleep(cycles: int) -> Any:
        return lambda: torch.cuda._sleep(cycles)

    seconds(call, 20)
    # A sleep has a cost of its own: two lengths give its slope and its start.
    short, long = (min(seconds(sleep(n), 20) for _ in range(5)) for n in (10_000, 1_000_000))
    slope = (long - short) / 990_000
    start = short - 10_000 * slope
    wanted = share * min(seconds(call, 20) for _ in range(5))
    cycles = int((wanted - start) / slope)
    if cycles < 1:
        raise Unsupported(f"{share:.0%} of a call is less than a device sleep's {start * 1e6:.1f} us")
    return cycles
