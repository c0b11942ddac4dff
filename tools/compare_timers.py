"""Our timers beside torch's profiler and Triton's do_bench, on the same kernels. Needs a GPU.

    python -m tools.compare_timers > results/MACHINE/timers.md

Agreement with the profiler is asked of single kernels of more than 20 us; the other columns show what a graph
and a rotation past the last-level cache change.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate

from harness.catalogue.devices import last_level
from harness.plan.rotation import MOST_COPIES, ROTATE_CACHES
from harness.workers.child.profile import profile
from harness.workers.child.timers.base import Call, Timer
from kernels.platform import detect

TURN_S, TURNS = 0.05, 9
SHAPES = ((16, 2112, 7168), (128, 2112, 7168), (1024, 2112, 7168), (4096, 7168, 2048), (8192, 8192, 8192))
READS = (8 << 20, 64 << 20, 1 << 30)  # bytes


def contenders(device: str) -> dict[str, tuple[int, Callable[[], Call]]]:
    """Name -> (bytes that a call reads, what makes a call on operands of its own)."""
    import torch

    def product(m: int, n: int, k: int) -> Call:
        a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
        out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        return lambda: torch.mm(a, b.t(), out=out)

    def copy(count: int) -> Call:
        source = torch.randn(count // 4, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    made: dict[str, tuple[int, Callable[[], Call]]] = {
        f"bf16 product {m} x {n} x {k}": (2 * (m + n) * k, lambda s=(m, n, k): product(*s))
        for m, n, k in SHAPES
    }
    return made | {f"copy of {count >> 20} MiB": (count, lambda c=count: copy(c)) for count in READS}


def seconds(timer: Timer, calls: Sequence[Call]) -> float:
    program = timer.program(calls)
    return statistics.median(timer.turn(program, TURN_S).seconds for _ in range(TURNS))


def row(name: str, reads: int, make: Callable[[], Call], level: int) -> list[Any]:
    import torch
    from triton.testing import do_bench, do_bench_cudagraph

    from harness.workers.child.timers.events import EventTimer
    from harness.workers.child.timers.graph import GraphTimer

    call = make()
    for _ in range(3):
        call()
    copies = min(MOST_COPIES, -(-ROTATE_CACHES * level // reads) + 1)
    cold = [call, *(make() for _ in range(copies - 1))]
    for one in cold:
        one()
    eager, graph = EventTimer(), GraphTimer()
    warm_eager, warm_graph = seconds(eager, [call]), seconds(graph, [call])
    cold_eager, cold_graph = seconds(eager, cold), seconds(graph, cold)
    profiled = profile([call], "cuda", torch.cuda.synchronize)
    with torch.cuda.stream(torch.cuda.Stream()):
        in_graph = do_bench_cudagraph(call, return_mode="median") / 1e3
    flushed = do_bench(call, return_mode="median") / 1e3
    launches = sum(kernel["count"] for kernel in profiled["kernels"])
    by_profiler = profiled["total_us"] / 1e6
    apart = f"{warm_eager / by_profiler - 1:+.2%}" if by_profiler else ""
    warm = [_micro(s) for s in (warm_eager, warm_graph, in_graph, by_profiler)]
    rotated = [_micro(s) for s in (cold_eager, cold_graph, flushed)]
    return [name, f"{launches:g}", *warm, apart, copies, *rotated]


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


HEADERS = [
    "call", "kernels", "eager", "graph", "do_bench_cudagraph", "profiler", "eager over profiler",
    "copies", "eager, rotated", "graph, rotated", "do_bench",
]  # fmt: skip


def main() -> None:
    platform = detect()
    if platform.kind == "cpu":
        sys.exit("error: no GPU here; this compares device timers")
    level = last_level(platform)
    found = contenders(platform.device)
    rows = [row(name, reads, make, level) for name, (reads, make) in found.items()]
    print(f"# Timers on {platform.name}\n")
    print(
        "Microseconds per call, medians; warm unless rotated. do_bench writes over the L2 before each call.\n"
    )
    print(tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
