"""A load, the kernel times of a step under it, and what TPOT and TTFT of a closed loop are made of.

A step either prefills or decodes, and waiting prompts come first (SGLang's schedule). So each prefill stalls
all that decode, and over the life of one request every other one is prefilled once:

    TPOT = (a + k * decode) / accepted + p * stall  stall = batch / (tokens out - 1) * prefill of one prompt
    TTFT = h + q * prefill + what it waits          and, over a whole run, its first wave of prompts

`accepted` is of speculation: the tokens that a request gets of a step, 1 without it. All of a step but the
stalls is spread over them. The constants a, k, p and h, q are one system's; see calibration.py, where the
first wave's two are, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.errors import HarnessError, UsageError
from harness.serving.link.structure import StepLoad, Structure, Term

Array = np.ndarray
PREFILL_TOKENS = 16384
"""Of one prefill step where nothing says it: SGLang's --chunked-prefill-size on GPUs of 160 GB and more."""
MEMORY_SHARE = 0.82  # of the GPU's, for weights and cache (SGLang's --mem-fraction-static)
# Of that, what is neither: absorbed weights, workspaces, buffers of collectives. Set so that some of 64
# requests of 8192 tokens wait with SGLang on H200, as InferenceX's do.
BESIDE_GB = 3.0
BETWEEN_POINTS = math.sqrt(2)  # factor between two points of a grid; times are interpolated between them
ROUNDS, SETTLED = 500, 1e-7
DRAIN = 0.4
"""Of a request's life, by which the last requests outlast the mean ones at the end of a run. Between 0, were
all to end together, and 0.5, were their ends spread evenly."""
WARM_FROM = {"trtllm": 8192}
"""Tokens of a prompt that finds its kernels compiled, of engines that warm up with a long prompt:
InferenceX's first wave of 8192 tokens takes little more than its prefills with TensorRT-LLM, that of 1024 1
to 4 s more."""


@dataclass(frozen=True)
class Load:
    """A closed loop: a fixed number of requests in flight, each followed by the next.

    isl, osl:       tokens in and out, at most
    range_ratio:    lengths are uniform from range_ratio * length to length (InferenceX: 0.8); 1: all alike,
                    then requests stay in step with each other
    prefill_tokens: of one step (SGLang's --chunked-prefill-size)
    waves:          prompts for each place, of which the first come all at once
    recv_interval:  decode steps between two looks for new requests (SGLang's --scheduler-recv-interval)
    accept_length:  tokens that a request gets of a step, accepted drafts + 1; None: as the server's others

    Raises UsageError for a number that no load has.
    """

    isl: int
    osl: int
    concurrency: int
    range_ratio: float = 0.8
    prefill_tokens: int = PREFILL_TOKENS
    waves: int = 10
    recv_interval: int = 1
    accept_length: float | None = None

    def __post_init__(self) -> None:
        least = {"isl": 1, "osl": 2, "concurrency": 1, "prefill_tokens": 1, "waves": 1, "recv_interval": 1}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name}={getattr(self, name)} must be at least {minimum}")
        if not 0 <= self.range_ratio <= 1:
            raise UsageError(f"range_ratio={self.range_ratio} must be from 0 to 1")

    @property
    def mean_isl(self) -> float:
        return self.isl * (1 + self.range_ratio) / 2

    @property
    def mean_osl(self) -> float:
        return max(self.osl * (1 + self.range_ratio) / 2, 2.0)

    @property
    def mean_context(self) -> float:
        """Cached tokens of a decoding request, over its life."""
        return self.mean_isl + self.mean_osl / 2

    @property
    def most_together(self) -> float:
        """Prompts that one prefill step takes."""
        return max(self.prefill_tokens / self.mean_isl, 1.0)

    def output(self, life_ms: float) -> float:
        """Tokens/s of the instance over a whole run, of requests that live so long. At its end fewer and
        fewer are in flight."""
        drained = DRAIN if self.concurrency > 1 and self.range_ratio < 1 else 0.0
        return self.concurrency * self.mean_osl / life_ms * 1e3 * self.waves / (self.waves + drained)


@dataclass(frozen=True)
class Phase:
    """The terms of one phase over a grid: batches of decode, prompts of a prefill step.

    us: [terms, grid] of all calls of a step
    """

    terms: Sequence[Term]
    grid: Array
    us: Array

    def at(self, point: float) -> Array:
        """us of each term, [terms]; linear in the logarithm of the grid, its ends beyond it."""
        place = np.interp(math.log(point), np.log(self.grid), np.arange(len(self.grid)))
        left, right = self.us[:, math.floor(place)], self.us[:, math.ceil(place)]
        return left + (place % 1) * (right - left)

    def ms(self, point: float) -> float:
        """Of all terms."""
        return float(self.at(point).sum()) / 1e3

    def indices(self, op: str, part: str = "") -> list[int]:
        return [i for i, term in enumerate(self.terms) if term.op == op and part in ("", term.part)]


@dataclass(frozen=True)
class KernelSums:
    """capacity: requests of the load that the cache holds; infinite where memory is not known
    cold:     how cold the first wave finds the server, 0 to 1"""

    load: Load
    decode: Phase
    prefill: Phase
    capacity: float = math.inf
    cold: float = 0.0

    def having(self, phase: str, us: Array) -> KernelSums:
        """With other times of that phase, [terms, grid]."""
        return replace(self, **{phase: replace(getattr(self, phase), us=us)})


@functools.cache
def kernel_sums(structure: Structure, load: Load, memory_gb: float | None, cold: float) -> KernelSums:
    """memory_gb: of a GPU, 1e9 bytes; None: no limit to the cache. Raises UsageError where it holds no
    request."""
    capacity = math.inf
    if memory_gb:
        room = memory_gb * MEMORY_SHARE - structure.weights_gb - BESIDE_GB
        capacity = room / (structure.kv_bytes * load.mean_context / 1e9)
        if capacity < 1:
            raise UsageError(
                f"no request of {load.mean_context:.0f} tokens fits: weights take "
                f"{structure.weights_gb:.1f} GB of each GPU's {memory_gb:.1f}"
            )
    chunks, q = math.ceil(load.mean_isl / load.prefill_tokens), 1 + structure.drafts
    together = min(load.most_together, float(load.concurrency))
    decode = _phase(structure.decode, min(float(load.concurrency), capacity),
                    lambda batch: StepLoad(q * batch, batch, load.mean_context, q), 1)  # fmt: skip
    prefill = _phase(structure.prefill, together,
                     lambda n: StepLoad(n * load.mean_isl / chunks, n, load.mean_isl), chunks)  # fmt: skip
    return KernelSums(load, decode, prefill, capacity, cold)


def _phase(terms: Sequence[Term], most: float, step: Callable[[float], StepLoad], chunks: int) -> Phase:
    """Over a grid from 1 to `most`. The attention of a prompt in chunks is that of the whole, the rest is
    called once a chunk."""
    points = 1 + math.ceil(math.log(most) / math.log(BETWEEN_POINTS)) if most > 1 else 1
    grid = np.geomspace(1.0, most, points)
    loads = [step(float(point)) for point in grid]
    calls = [term.calls * (1 if term.op == "mha_prefill" else chunks) for term in terms]
    us = [[n * term.time(load) for load in loads] for n, term in zip(calls, terms, strict=True)]
    return Phase(terms, grid, np.array(us))


@dataclass(frozen=True)
class Features:
    """What the constants are multiplied with, at given TPOT and TTFT.

    tpot:    of a, k, p: 1 and ms of a decode step, both over the accept length, and ms of stall
    steady:  of h, q, cold, each: TTFT after the first wave, as a client's median
    mean:    of the same constants: TTFT over the whole run
    waiting, waiting_mean: ms of either TTFT that no constant is of: for the end of a decode step, for memory
    batch:   requests that decode together
    queue_ms: of `waiting`, what a request waits for memory
    """

    tpot: Array
    steady: Array
    mean: Array
    waiting: float
    waiting_mean: float
    batch: float
    queue_ms: float


def features(sums: KernelSums, tpot_ms: float, ttft_ms: float) -> Features:
    """ttft_ms: of the steady state"""
    load, accepted = sums.load, sums.load.accept_length or 1.0
    c, n, waves = load.concurrency, load.mean_osl - 1, load.waves
    others = (c - 1) / c
    free = c * n * tpot_ms / (ttft_ms + n * tpot_ms)
    batch = min(free, sums.capacity)
    rate = batch / (n * tpot_ms)  # of prompts, per ms
    one = sums.prefill.ms(1)
    mean, last = _wave(sums)
    queue = max(c / rate - n * tpot_ms - ttft_ms, 0.0) if batch < free else 0.0
    if load.range_ratio == 1 and batch == free:
        # All in step: all prompts are prefilled, then all decode; an early one waits for the last.
        batch, stall, waiting, prefilling = float(c), (last - mean) / n, 0.0, mean
    else:
        stall = batch / n * others * one
        waiting = others * tpot_ms * accepted * load.recv_interval / 2
        residual = others * min(rate * one, 1.0) * one / 2  # of a prefill that runs when a prompt comes
        together = min(1 + rate * others * (waiting + residual), load.most_together)
        prefilling = sums.prefill.ms(together) + residual
    steady = np.array([1.0, prefilling, 0.0, 0.0])
    first = np.array([1.0, mean, sums.cold, sums.cold * (c + 1) / 2])
    return Features(
        tpot=np.array([1 / accepted, sums.decode.ms(batch) / accepted, stall]),
        steady=steady,
        mean=(first + (waves - 1) * steady) / waves,
        waiting=waiting + queue,
        # The first wave finds the memory empty: it waits half as long for it.
        waiting_mean=(waves - 1) / waves * (waiting + queue) + queue / 2 / waves,
        batch=batch,
        queue_ms=queue,
    )


def settled(sums: KernelSums, tpot: Array, ttft: Array) -> Features:
    """The features at the TPOT and TTFT that they themselves lead to. tpot: a, k, p; ttft: h, q, cold, each.
    Raises HarnessError where they do not settle."""
    least = 0.05 * sums.decode.ms(1)  # a may be below zero
    tpot_ms = max(float(tpot @ [1.0, sums.decode.ms(sums.load.concurrency), 0.0]), least)
    ttft_ms = 0.0
    for _ in range(ROUNDS):
        found = features(sums, tpot_ms, ttft_ms)
        new_tpot = max(float(found.tpot @ tpot), least)
        new_ttft = max(float(found.steady @ ttft) + found.waiting - found.queue_ms, 0.0)
        moved = abs(new_tpot / tpot_ms - 1) + abs(new_ttft - ttft_ms) / (1 + ttft_ms)
        tpot_ms, ttft_ms = (tpot_ms + new_tpot) / 2, (ttft_ms + new_ttft) / 2
        if moved < SETTLED:
            return found
    raise HarnessError(
        f"the batch at concurrency {sums.load.concurrency} does not settle: after {ROUNDS} rounds TPOT still "
        f"moves from {tpot_ms:.3g} to {new_tpot:.3g} ms"
    )


def _wave(sums: KernelSums) -> tuple[float, float]:
    """Mean and last end of the prefills of all prompts in flight when they come at once, ms."""
    count = sums.load.concurrency
    together = min(math.floor(sums.load.most_together), count)
    full, left = divmod(count, together)
    whole = sums.prefill.ms(together)
    last = full * whole + (sums.prefill.ms(left) if left else 0.0)
    return (together * whole * full * (full + 1) / 2 + left * last) / count, last
