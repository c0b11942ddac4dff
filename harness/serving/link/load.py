"""A load, the kernel times of a step under it, and the parts of TPOT and TTFT in a closed loop.

A step either prefills or decodes, and waiting prompts come first (SGLang's schedule). So each prefill stalls
all requests that decode, and during the life of a request every other request is prefilled once:

    TPOT  = (a + k * decode) / accepted + p * stall
    stall = batch / (tokens out - 1) * prefill of one prompt
    TTFT  = h + q * prefill + waiting

The mean TTFT of a whole run also counts the first wave of prompts, which come at once. `accepted` is the
number of tokens that a request gets of a step: 1 without speculation. The time of a step, without the stalls,
is spread over them. The constants a, k, p, h and q belong to one system; calibration.py explains them, and
the two constants of the first wave.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import HarnessError, UsageError
from harness.serving.link.structure import StepLoad, Structure, Term

Array = np.ndarray
PREFILL_TOKENS = 16384  # of one prefill step: SGLang's --chunked-prefill-size on GPUs of 160 GB and more
MEMORY_SHARE = 0.82  # the share of a GPU's memory for weights and cache (SGLang's --mem-fraction-static)
# The part of that share for absorbed weights, workspaces and buffers of collectives. With this value some of
# 64 requests of 8192 tokens wait with SGLang on H200, as InferenceX's do.
WORKSPACES_GB = 3.0
GRID_FACTOR = math.sqrt(2)  # between two points of a grid; times are interpolated between them
MAX_ITERATIONS = 500
TOLERANCE = 1e-7  # relative change of TPOT and TTFT at which the closed loop has converged
DRAIN = 0.4
"""How much longer than a mean request the last requests of a run take, as a share of a request's life. It
would be 0 if all requests ended together, and 0.5 if their ends were spread evenly."""
WARM_FROM = {"trtllm": 8192}
"""Engines that warm up with a long prompt, and the length from which on a prompt finds its kernels compiled.
With TensorRT-LLM InferenceX's first wave of 1024 tokens takes 1 to 4 s more than its prefills, that of 8192
tokens takes little more."""


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
    def prompts_per_step(self) -> float:
        """The most prompts that one prefill step takes."""
        return max(self.prefill_tokens / self.mean_isl, 1.0)

    def output_tok_s(self, life_ms: float) -> float:
        """Output of the instance over a whole run, with its end, if a request lives `life_ms`."""
        drain = DRAIN if self.concurrency > 1 and self.range_ratio < 1 else 0.0
        return self.concurrency * self.mean_osl / life_ms * 1e3 * self.waves / (self.waves + drain)


@dataclass(frozen=True)
class Phase:
    """The terms of one phase, with their times over a grid of batches.

    grid: [points], the number of requests in a decode step, or of prompts in a prefill step
    us:   [terms, points], the time of all calls of a term in one step
    """

    terms: Sequence[Term]
    grid: Array
    us: Array

    def us_at(self, batch: float) -> Array:
        """The us of each term, [terms]: linear in the logarithm of the batch, constant beyond the grid."""
        place = np.interp(math.log(batch), np.log(self.grid), np.arange(len(self.grid)))
        left, right = self.us[:, math.floor(place)], self.us[:, math.ceil(place)]
        return left + (place % 1) * (right - left)

    def ms(self, batch: float) -> float:
        """The time of all terms in one step."""
        return float(self.us_at(batch).sum()) / 1e3

    def indices(self, op: str, part: str = "") -> list[int]:
        """The indices of an op's terms, or of those of one part of it."""
        return [i for i, term in enumerate(self.terms) if term.op == op and part in ("", term.part)]


@dataclass(frozen=True)
class KernelSums:
    """The kernel times of a load."""

    load: Load
    decode: Phase
    prefill: Phase
    capacity: float = math.inf  # requests of the load that the cache holds; inf: the memory is not known
    cold: float = 0.0  # how cold the server is for the first wave, 0 to 1


@functools.cache
def kernel_sums(structure: Structure, load: Load, memory_gb: float | None, cold: float) -> KernelSums:
    """The kernel times of a load. memory_gb: of a GPU, or no limit. Raises UsageError if no request fits."""
    capacity = math.inf
    if memory_gb:
        cache_gb = memory_gb * MEMORY_SHARE - structure.weights_gb - WORKSPACES_GB
        capacity = cache_gb / (structure.kv_bytes * load.mean_context / 1e9)
        if capacity < 1:
            raise UsageError(
                f"no request of {load.mean_context:.0f} tokens fits: weights take "
                f"{structure.weights_gb:.1f} GB of each GPU's {memory_gb:.1f}"
            )
    query_tokens = 1 + structure.drafts  # of a sequence in a decode step
    context, isl = load.mean_context, load.mean_isl
    chunks = math.ceil(isl / load.prefill_tokens)  # prefill steps of one prompt
    batches = _grid(min(float(load.concurrency), capacity))
    prompts = _grid(min(load.prompts_per_step, float(load.concurrency)))
    decode_steps = [
        StepLoad(query_tokens * batch, batch, context, query_tokens) for batch in batches.tolist()
    ]
    prefill_steps = [StepLoad(count * isl / chunks, count, isl) for count in prompts.tolist()]
    decode_us = [[term.calls * term.time(step) for step in decode_steps] for term in structure.decode]
    prefill_us = []
    for term in structure.prefill:
        # Each chunk calls every kernel. The time of attention is already that of the whole prompt.
        calls = term.calls if term.op == "mha_prefill" else term.calls * chunks
        prefill_us.append([calls * term.time(step) for step in prefill_steps])
    decode = Phase(structure.decode, batches, np.array(decode_us))
    return KernelSums(load, decode, Phase(structure.prefill, prompts, np.array(prefill_us)), capacity, cold)


def _grid(most: float) -> Array:
    """Batches from 1 to `most`, of which each is about GRID_FACTOR times the one before."""
    points = 1 + math.ceil(math.log(most) / math.log(GRID_FACTOR)) if most > 1 else 1
    return np.geomspace(1.0, most, points)


@dataclass(frozen=True)
class Features:
    """What the constants are multiplied with, and the waits that are added to TTFT, at a given TPOT and TTFT.

    TPOT = tpot . [a, k, p]. The steady TTFT, which comes after the first wave and is a client's median, is
    steady . [h, q, cold, each] + waiting_ms. The mean TTFT of the whole run has `mean` and `mean_waiting_ms`.

    tpot:       [1, ms of a decode step, ms of stall], the first two over the accept length
    waiting_ms: for the end of a decode step, and for memory
    batch:      requests that decode together
    queue_ms:   the part of waiting_ms that is for memory
    """

    tpot: Array
    steady: Array
    mean: Array
    waiting_ms: float
    mean_waiting_ms: float
    batch: float
    queue_ms: float


def features(sums: KernelSums, tpot_ms: float, ttft_ms: float) -> Features:
    """The features at a TPOT and a steady TTFT. If more requests would decode with this TTFT than the cache
    holds, they wait for memory: `queue_ms` is the wait that must be added to the TTFT."""
    load = sums.load
    concurrency, waves = load.concurrency, load.waves
    accepted = load.accept_length or 1.0
    others = (concurrency - 1) / concurrency  # the share of other requests among those in flight
    tokens = load.mean_osl - 1  # after the first one, which prefill makes
    decoding_ms = tokens * tpot_ms  # of a request
    # By Little's law as many requests decode as the share of decoding in a request's life says.
    unlimited = concurrency * decoding_ms / (ttft_ms + decoding_ms)
    batch = min(unlimited, sums.capacity)
    prompts_per_ms = batch / decoding_ms
    prefill_ms = sums.prefill.ms(1)
    wave_mean_ms, wave_end_ms = _first_wave(sums)
    queue_ms = 0.0
    if batch < unlimited:  # A request's life is concurrency / prompts_per_ms, also by Little's law.
        queue_ms = max(concurrency / prompts_per_ms - decoding_ms - ttft_ms, 0.0)
    if load.range_ratio == 1 and batch == unlimited:
        # All requests are in step: all prompts are prefilled, then all decode. Early ones wait for the last.
        batch, stall_ms = float(concurrency), (wave_end_ms - wave_mean_ms) / tokens
        step_wait_ms, own_prefill_ms = 0.0, wave_mean_ms
    else:
        stall_ms = batch / tokens * others * prefill_ms
        step_wait_ms = others * tpot_ms * accepted * load.recv_interval / 2
        # A prompt that comes while another is prefilled waits for half of that prefill.
        residual_ms = others * min(prompts_per_ms * prefill_ms, 1.0) * prefill_ms / 2
        # Prompts that come while this one waits are prefilled with it.
        prompts = min(1 + prompts_per_ms * others * (step_wait_ms + residual_ms), load.prompts_per_step)
        own_prefill_ms = sums.prefill.ms(prompts) + residual_ms
    steady = np.array([1.0, own_prefill_ms, 0.0, 0.0])
    # The i-th prompt of the first wave waits for i times `each`.
    first = np.array([1.0, wave_mean_ms, sums.cold, sums.cold * (concurrency + 1) / 2])
    waiting_ms = step_wait_ms + queue_ms
    return Features(
        tpot=np.array([1 / accepted, sums.decode.ms(batch) / accepted, stall_ms]),
        steady=steady,
        mean=(first + (waves - 1) * steady) / waves,
        waiting_ms=waiting_ms,
        # The first wave finds the memory empty, so that it waits half as long.
        mean_waiting_ms=(waves - 1) / waves * waiting_ms + queue_ms / 2 / waves,
        batch=batch,
        queue_ms=queue_ms,
    )


def settled_features(sums: KernelSums, tpot_constants: Array, ttft_constants: Array) -> Features:
    """The features at the TPOT and TTFT that follow from them with these constants, [3] and [4]. Raises
    HarnessError if the iteration does not converge."""
    least_ms = 0.05 * sums.decode.ms(1)  # TPOT stays above this, because `a` may be negative
    tpot_ms = max(float(tpot_constants @ [1.0, sums.decode.ms(sums.load.concurrency), 0.0]), least_ms)
    ttft_ms = 0.0  # without the wait for memory, so that `queue_ms` is all of it
    for _ in range(MAX_ITERATIONS):
        at_these = features(sums, tpot_ms, ttft_ms)
        new_tpot_ms = max(float(at_these.tpot @ tpot_constants), least_ms)
        step_wait_ms = at_these.waiting_ms - at_these.queue_ms
        new_ttft_ms = max(float(at_these.steady @ ttft_constants) + step_wait_ms, 0.0)
        moved = abs(new_tpot_ms / tpot_ms - 1) + abs(new_ttft_ms - ttft_ms) / (1 + ttft_ms)
        tpot_ms, ttft_ms = (tpot_ms + new_tpot_ms) / 2, (ttft_ms + new_ttft_ms) / 2
        if moved < TOLERANCE:
            return at_these
    raise HarnessError(
        f"the batch at concurrency {sums.load.concurrency} does not settle: after {MAX_ITERATIONS} rounds "
        f"TPOT still moves from {tpot_ms:.3g} to {new_tpot_ms:.3g} ms"
    )


def _first_wave(sums: KernelSums) -> tuple[float, float]:
    """The mean end and the last end in ms of the prefills of all prompts in flight, if they come at once."""
    prompts = sums.load.concurrency
    per_step = min(math.floor(sums.load.prompts_per_step), prompts)
    full_steps, left_over = divmod(prompts, per_step)
    step_ms = sums.prefill.ms(per_step)
    last_ms = full_steps * step_ms + (sums.prefill.ms(left_over) if left_over else 0.0)
    sum_of_ends_ms = per_step * step_ms * full_steps * (full_steps + 1) / 2 + left_over * last_ms
    return sum_of_ends_ms / prompts, last_ms
