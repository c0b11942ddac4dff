"""The rule of `triton.testing.do_bench`, which itself needs a GPU, on the CPU's clock.

After triton 3.7, python/triton/testing.py, `do_bench` and `_quantile`: one call; five with the cache cleared
before each for an estimate, which holds the clearing; `warmup` ms of calls; `rep` ms of calls, each timed by
itself after the cache was cleared. The driver's buffer for it is 256 MiB, several times a GPU's L2, and
clearing it takes less than most kernels. Here that much is tens of milliseconds and would leave the rule two
repetitions: the buffer is the last-level cache twice, where that is less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kernels.platform import detect
from tools.engines.callables import Call, prepare
from tools.engines.verdicts import Ranking, by_estimate

WARMUP_MS, REP_MS, ESTIMATES = 25, 100, 5
TRITON_BUFFER, LEVELS = 256 << 20, 2


def rank(names: Sequence[str]) -> Ranking:
    clear = cache_clearer(detect("cpu").last_level)
    seconds = {name: median(do_bench(prepare(name), clear)) for name in names}
    return Ranking(seconds, by_estimate(seconds, names[0]))


def cache_clearer(last_level: int) -> Call:
    """last_level: bytes, 0 if unknown"""
    import torch

    size = min(TRITON_BUFFER, LEVELS * last_level or TRITON_BUFFER)
    return torch.empty(size // 4, dtype=torch.int).zero_


def do_bench(call: Call, clear: Call, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each repetition."""
    call()
    started = clock()
    for _ in range(ESTIMATES):
        clear()
        call()
    estimate_ms = 1e3 * (clock() - started) / ESTIMATES
    for _ in range(max(1, int(WARMUP_MS / estimate_ms))):
        call()
    times = []
    for _ in range(max(1, int(REP_MS / estimate_ms))):
        clear()
        started = clock()
        call()
        times.append(clock() - started)
    return times


def median(times: Sequence[float]) -> float:
    """Triton's own quantile: what its tables plot, with the 20th and the 80th percentile as a band."""
    from triton.testing import _quantile

    return _quantile(times, [0.5])[0]
