"""Meter, inside a worker: the device's highest rates, and workloads that show how steady its times are."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from harness.workers.child.device import OnDevice
from harness.workers.child.timers import Program, timer_for
from kernels.formats import FORMATS, native

Call = Callable[[], Any]
Candidate = tuple[float, Callable[[], Call]]
"""How much one call moves (bytes) or computes (flops), and a function that prepares the call."""


class Tried(NamedTuple):
    """A candidate that was tried."""

    amount: float  # as of a Candidate
    program: Program
    first_rate: float  # amount per second


MIB = 1 << 20
LEVELS = 4
REACHES = 2
"""The buffer is LEVELS times as large as the last-level cache, or REACHES times as large as its measured
`reach`, so that reads come from memory; no larger, as a new VM takes 4 s to fault in a GiB."""
LEAST_BUFFER = {"cpu": 256 * MIB, "cuda": 2048 * MIB, "rocm": 2048 * MIB}  # the least bytes that are read
MEMORY_SHARE = 1 / 8  # the share of the free memory that is used at most
SHAPES = (
    (768, 768, 768),
    (1024, 1024, 1024),
    (256, 2112, 7168),
    (2048, 2048, 2048),
    (3200, 2112, 7168),
    (4096, 4096, 4096),
    (4096, 7168, 2048),
    (8192, 8192, 8192),
    (16384, 8192, 8192),
)
"""(m, n, k) of products, from what suits two cores to what fills a large GPU. Which one is fastest differs
by machine and library: on two cores 2048^3 reached 92 % of the best, and 98 % with prepacked weights."""
STEADY_SIZE = {"cpu": 1024, "cuda": 8192, "rocm": 8192}
PRODUCTS = {"cpu": ("bf16", "fp32"), "cuda": ("fp8", "bf16"), "rocm": ("fp8", "bf16")}
"""Dtypes of products. A CPU converts FP8 to bf16; fp32 counts where it has no bf16 instructions."""
TRY_S = 0.02  # seconds of one timed try
LONGEST_CALL_S = 0.2  # a candidate whose call would take longer than this is left out
READ_S, COPY_S, PRODUCT_S = 0.6, 0.4, 0.8  # seconds that are spent on looking for the best rate of each kind
BELIEVED = 64 * MIB  # a stated last-level cache of up to so many bytes is believed without measuring
FASTER = 1.15
"""A virtual machine may state a larger cache that is only its host's. Then its reach is measured. Sizes that
are read FASTER times as fast as memory lie within the cache."""
REACH_S = 1.0  # seconds for measuring the reach of a cache
REACH_SAMPLE_S = 0.04  # seconds of each sample of it


class Meter(OnDevice):
    """Each public method is one request of the parent process."""

    failure = "there is no memory for any product"  # why a candidate could not run; of several, the last

    def open(self, arch: str, memory: int, last_level: int) -> int:
        """Returns how many bytes `measure` reads. memory: free bytes; last_level: bytes of the last-level
        cache; both 0 if unknown"""
        self.arch = arch
        self.timer = timer_for(self.kind, "eager")
        self.usable_bytes = MEMORY_SHARE * memory if memory else math.inf
        is_doubtful = self.kind == "cpu" and last_level > BELIEVED
        self.reach = self._measured_reach(last_level) if is_doubtful else 0
        self.bytes = buffer_bytes(self.kind, self.usable_bytes, last_level, self.reach)
        return self.bytes

    def measure(self) -> dict[str, Any]:
        """The fields of `Ceilings`: `rates` in flops/s, `read` and `copy` in bytes/s, and `reach` in bytes.
        A dtype in which no product works here has no rate."""
        buffer = self._buffer(self.bytes)
        read = self._best(self._readers(buffer), READ_S)
        copy = self._best(self._copiers(buffer), COPY_S)
        del buffer
        rates = {dtype: self._best(self._products(dtype), PRODUCT_S) for dtype in PRODUCTS[self.kind]}
        if not all((read, copy, rates["bf16"])):
            raise RuntimeError(self.failure)
        rates = {dtype: rate for dtype, rate in rates.items() if rate}
        return {"rates": rates, "read": read, "copy": copy, "reach": self.reach}

    def _measured_reach(self, claimed: int) -> int:
        """The `reach` of the last-level cache. claimed: its stated size in bytes"""
        buffer = self._buffer(int(min(2 * claimed, self.usable_bytes))).view(torch.int64)
        # BELIEVED, twice as much and so on, up to the claimed size; and the whole buffer.
        sizes = [BELIEVED * 2**doublings for doublings in range((claimed // BELIEVED).bit_length())]
        sizes = [size for size in sizes if size < buffer.nbytes] + [buffer.nbytes]
        programs = {size: self.timer.program([buffer[: size // buffer.itemsize].sum]) for size in sizes}
        rates = defaultdict[int, float](float)
        until = time.monotonic() + REACH_S
        while time.monotonic() < until or not rates:
            # In turn, because a disturbance would otherwise make one of them look slow.
            for size, program in programs.items():
                rates[size] = max(rates[size], size / self.timer.sample(program, REACH_SAMPLE_S).seconds)
        return reach(rates)

    def clock(self, readings: int = 2000) -> dict[str, float]:
        """`step_s`: the smallest step of the timer's clock, and `reading_s`: the time from one reading to the
        next, in seconds. On GPUs the readings are events with nothing between them."""
        if self.kind == "cpu":
            times = [time.perf_counter() for _ in range(readings)]
        else:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(readings)]
            for event in events:
                event.record()
            torch.cuda.synchronize()
            times = [events[0].elapsed_time(event) / 1e3 for event in events]
        steps = [late - early for early, late in itertools.pairwise(times) if late > early]
        return {"step_s": min(steps), "reading_s": (times[-1] - times[0]) / (readings - 1)}

    def prepare(self, workload: str) -> None:
        """Prepares one of the steady workloads: `read` or `product`."""
        self.program = Program([])  # frees the buffers of the last one
        size = STEADY_SIZE[self.kind]
        if workload == "read":
            call = self._buffer(self.bytes).view(dtype=torch.int64).sum
        else:
            call = self._mm(size, size, size, "bf16")
        call()
        self.program = self.timer.program([call])

    def sample(self, at_least_s: float) -> float:
        """Seconds per call of the prepared workload."""
        return self.timer.sample(self.program, at_least_s).seconds

    def _best(self, candidates: Iterable[Candidate], seconds: float) -> float:
        """The highest rate of all candidates, found within so many seconds: each is tried once, unless its
        call would take too long, and the better half then again and again. 0 where none can run here."""
        until = time.monotonic() + seconds
        tried = sorted(self._tried(candidates), key=lambda one: one.first_rate, reverse=True)
        fastest = tried[: max(3, len(tried) // 2)]
        best = fastest[0].first_rate if fastest else 0.0
        while fastest and time.monotonic() < until:
            best = max(best, *(self._rate(one.amount, one.program) for one in fastest))
        return best

    def _tried(self, candidates: Iterable[Candidate]) -> list[Tried]:
        """Tries each candidate once, except those larger than the first whose call would take too long."""
        tried: list[Tried] = []
        best = 0.0
        for amount, make in candidates:
            if tried and amount > tried[0].amount and amount > LONGEST_CALL_S * best:
                continue
            try:
                call = make()
                call()
                program = self.timer.program([call])
                tried.append(Tried(amount, program, self._rate(amount, program)))
                best = max(best, tried[-1].first_rate)
            except (RuntimeError, ValueError, AttributeError) as reason:
                self.failure = str(reason)
        return tried

    def _rate(self, amount: float, program: Program) -> float:
        return amount / self.timer.sample(program, TRY_S).seconds

    def _buffer(self, nbytes: int) -> Any:
        return self._random(nbytes // 2, dtype="bf16")  # 2 bytes each

    def _random(self, *shape: int, dtype: str) -> Any:
        """A tensor of Gaussian values, because zeros move and multiply faster. It repeats one million values:
        drawing more would take a CPU longer than measuring."""
        size = math.prod(shape)
        kinds = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": FORMATS[native(self.arch)].dtype}
        few = torch.randn(min(size, MIB), device=self.device).to(kinds[dtype])
        many = few.view(torch.uint8).repeat(math.ceil(size / len(few)))
        return many[: size * few.itemsize].view(few.dtype).view(shape)

    def _readers(self, buffer: Any) -> Iterator[Candidate]:
        """Reductions over the buffer; which one reads fastest differs by device."""
        words, singles = buffer.view(torch.int64), buffer.view(torch.float32)
        for call in (words.sum, buffer.sum, singles.max, functools.partial(torch.dot, singles, singles)):
            yield buffer.nbytes, _made(call)

    def _copiers(self, buffer: Any) -> Iterator[Candidate]:
        """Copies of one half of the buffer to the other."""
        for view in (buffer.view(torch.int64), buffer):
            target, source = view.chunk(2)
            yield 2 * source.nbytes, _made(functools.partial(target.copy_, source))

    def _products(self, dtype: str) -> Iterator[Candidate]:
        if dtype == "fp8":
            ways = [self._scaled_mm]
        else:
            ways = [self._mm, self._prepacked] if self.kind == "cpu" else [self._mm]
        for m, n, k in SHAPES:
            if 4 * (m * k + n * k + m * n) <= self.usable_bytes:
                for way in ways:
                    yield 2.0 * m * n * k, functools.partial(way, m, n, k, dtype)

    def _mm(self, m: int, n: int, k: int, dtype: str) -> Call:
        a, b = self._random(m, k, dtype=dtype), self._random(n, k, dtype=dtype)
        out = torch.empty(m, n, dtype=a.dtype, device=self.device)
        return lambda: torch.mm(a, b.t(), out=out)

    def _prepacked(self, m: int, n: int, k: int, dtype: str) -> Call:
        """A product with b in oneDNN's own layout, as torch.compile packs frozen weights."""
        a = self._random(m, k, dtype=dtype)
        b = torch.ops.mkldnn._reorder_linear_weight(self._random(n, k, dtype=dtype), m)
        return lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")

    def _scaled_mm(self, m: int, n: int, k: int, dtype: str) -> Call:
        """An FP8 product with one scale per tensor and the library's fastest accumulation. Block scales allow
        less; a ceiling may be higher than what they reach."""
        a, b = self._random(m, k, dtype=dtype), self._random(n, k, dtype=dtype)
        scale = torch.ones((), device=self.device)
        return lambda: torch._scaled_mm(
            a, b.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=self.kind == "cuda"
        )


def _made(call: Call) -> Callable[[], Call]:
    """The function of a Candidate whose call needs no preparation."""
    return lambda: call


def reach(rates: Mapping[int, float]) -> int:
    """The reach of a cache: the least size that is read about as slowly as the largest one, from memory.
    rates: bytes/s by size in bytes"""
    memory_rate = rates[max(rates)]
    return min(size for size, rate in rates.items() if rate < FASTER * memory_rate)


def buffer_bytes(kind: str, usable: float, last_level: int, reach: int = 0) -> int:
    """How many bytes are read, in whole MiB: beyond the last-level cache, within the `usable` bytes."""
    beyond_cache = REACHES * reach if reach else LEVELS * last_level
    wanted = max(LEAST_BUFFER[kind], beyond_cache)
    return max(1, int(min(wanted, usable)) // MIB) * MIB
