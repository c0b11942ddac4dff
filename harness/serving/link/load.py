"""A load, the kernel times of a step under it, and the parts of TPOT and TTFT in a closed loop.

A step either prefills or decodes, and waiting prompts come first (SGLang's schedule). So each prefill stalls
all requests that decode, and during the life of a request every other request is prefilled once:

    TPOT = (a + k * decode) / accepted + p * stall  stall = batch / (tokens out - 1) * prefill of one prompt
    TTFT = h + q * prefill + waiting                and, over a whole run, its first wave of prompts

Here `accepted` is the number of tokens that a request gets of a step: 1 without speculation. The time of a
step, without the stalls, is spread over them. The constants a, k, p, h and q belong to one system;
calibration.py explains them, and the two constants of the first wave.
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
"""Tokens of one prefill step by default: SGLang's --chunked-prefill-size on GPUs of 160 GB and more."""
MEMORY_SHARE = 0.82  # the share of a GPU's memory for weights and cache (SGLang's --mem-fraction-static)
# The part of it for absorbed weights, workspaces and buffers of collectives. With this value some of 64
# requests of 8192 tokens wait with SGLang on H200, as InferenceX's do.
BESIDE_GB = 3.0
BETWEEN_POINTS = math.sqrt(2)  # the factor between two points of a grid; times are interpolated between them
ROUNDS, SETTLED = 500, 1e-7
DRAIN = 0.4
"""How much longer than a mean request the last requests of a run take, as a share of a request's life. It
would be 0 if all requests ended together, and 0.5 if their ends were spread evenly."""
WARM_FROM = {"trtllm": 8192}
"""Engines that warm up with a long prompt, and the length from which on a prompt finds its kernels compiled.
With TensorRT-LLM InferenceX's first wave of 8192 tokens takes little more than its prefills, that of 1024
tokens takes 1 to 4 s more."""


@dataclass(frozen=True)
class Load:
    """A closed loop: a fixed number of requests in flight. When one ends, the next begins.

    isl, osl:       most tokens in and out
    range_ratio:    lengths are uniform from range_ratio * length to length (InferenceX: 0.8). With 1 all are
                    equal, and requests stay in step with each other
    prefill_tokens: tokens of one prefill step (SGLang's --chunked-prefill-size)
    waves:          prompts for each place in the loop; the first of each place come at once
    recv_interval:  decode steps between two looks for new requests (SGLang's --scheduler-recv-interval)
    accept_length:  tokens that a request gets of a step, accepted drafts + 1; None: the server's

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
        """Cached tokens of a decoding request, averaged over its life."""
        return self.mean_isl + self.mean_osl / 2

    @property
    def most_together(self) -> float:
        """Prompts that one prefill step takes."""
        return max(self.prefill_tokens / self.mean_isl, 1.0)

    def output(self, life_ms: float) -> float:
        """Output in tokens/s of the instance over a run of requests that live so long, with its end."""
        drained = DRAIN if self.concurrency > 1 and self.range_ratio < 1 else 0.0
        return self.concurrency * self.mean_osl / life_ms * 1e3 * self.waves / (self.waves + drained)


@dataclass(frozen=True)
class Phase:
    """The terms of one phase over a grid: over batches of decode, or over the number of prompts of a prefill
    step.

    us: [terms, grid] of all calls of a step
    """

    terms: Sequence[Term]
    grid: Array
    us: Array

    def at(self, point: float) -> Array:
        """The us of each term, [terms]: linear in the logarithm of the grid, constant beyond it."""
        place = np.interp(math.log(point), np.log(self.grid), np.arange(len(self.grid)))
        left, right = self.us[:, math.floor(place)], self.us[:, math.ceil(place)]
        return left + (place % 1) * (right - left)

    def ms(self, point: float) -> float:
        """The time of all terms."""
        return float(self.at(point).sum()) / 1e3

    def indices(self, op: str, part: str = "") -> list[int]:
        return [i for i, term in enumerate(self.terms) if term.op == op and part in ("", term.part)]


@dataclass(frozen=True)
class KernelSums:
    """The kernel times of a load.

    capacity: requests of the load that the cache holds; infinite if the memory is not known
    cold:     how cold the server is for the first wave, 0 to 1
    """

    load: Load
    decode: Phase
    prefill: Phase
    capacity: float = math.inf
    cold: float = 0.0

    def having(self, phase: str, us: Array) -> KernelSums:
        """These sums with other times of a phase, [terms, grid]."""
        return replace(self, **{phase: replace(getattr(self, phase), us=us)})


@functools.cache
def kernel_sums(structure: Structure, load: Load, memory_gb: float | None, cold: float) -> KernelSums:
    """The kernel times of a load. memory_gb: of a GPU, or no limit. Raises UsageError if no request fits."""
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
    """The terms over a grid from 1 to `most`. In chunks all but the attention is called for each."""
    points = 1 + math.ceil(math.log(most) / math.log(BETWEEN_POINTS)) if most > 1 else 1
    grid = np.geomspace(1.0, most, points)
    loads = [step(float(point)) for point in grid]
    calls = [term.calls * (1 if term.op == "mha_prefill" else chunks) for term in terms]
    us = [[n * term.time(load) for load in loads] for n, term in zip(calls, terms, strict=True)]
    return Phase(terms, grid, np.array(us))


@dataclass(frozen=True)
class Features:
    """The factors of the constants, at a given TPOT and TTFT.

    tpot:     factors of a, k, p: 1 and ms of a decode step, both over the accept length, and ms of stall
    steady:   factors of h, q, cold, each in the TTFT after the first wave, which is a client's median
    mean:     factors of the same constants in the TTFT over the whole run
    waiting:  ms of the steady TTFT without a constant: for the end of a decode step, and for memory
    waiting_mean: the same of the TTFT over the whole run
    batch:    requests that decode together
    queue_ms: the part of `waiting` that is for memory
    """

    tpot: Array
    steady: Array
    mean: Array
    waiting: float
    waiting_mean: float
    batch: float
    queue_ms: float


def features(sums: KernelSums, tpot_ms: float, ttft_ms: float) -> Features:
    """The factors of the constants. ttft_ms: that of the steady state"""
    load, accepted = sums.load, sums.load.accept_length or 1.0
    c, n, waves = load.concurrency, load.mean_osl - 1, load.waves
    others = (c - 1) / c
    free = c * n * tpot_ms / (ttft_ms + n * tpot_ms)
    batch = min(free, sums.capacity)
    rate = batch / (n * tpot_ms)  # prompts per ms
    one = sums.prefill.ms(1)
    mean, last = _wave(sums)
    queue = max(c / rate - n * tpot_ms - ttft_ms, 0.0) if batch < free else 0.0
    if load.range_ratio == 1 and batch == free:
        # All requests are in step: all prompts are prefilled, then all decode. Early ones wait for the last.
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
        # The first wave finds the memory empty, so that it waits half as long.
        waiting_mean=(waves - 1) / waves * (waiting + queue) + queue / 2 / waves,
        batch=batch,
        queue_ms=queue,
    )


def settled(sums: KernelSums, tpot: Array, ttft: Array) -> Features:
    """The features at the TPOT and TTFT to which they lead. Raises HarnessError if they do not settle."""
    least = 0.05 * sums.decode.ms(1)  # a may be negative
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
    """Mean and last end, in ms, of the prefills of all prompts in flight, if they come at once."""
    count = sums.load.concurrency
    together = min(math.floor(sums.load.most_together), count)
    full, left = divmod(count, together)
    whole = sums.prefill.ms(together)
    last = full * whole + (sums.prefill.ms(left) if left else 0.0)
    return (together * whole * full * (full + 1) / 2 + left * last) / count, last
