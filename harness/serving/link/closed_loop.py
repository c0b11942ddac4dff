"""Closed loop of requests: from step times to TPOT, TTFT and throughput at a fixed concurrency.

The engine is SGLang's by default: a step either prefills or decodes, and waiting prompts come first, so that
each prefill stalls all that decode. Over the life of one request every other one is prefilled once, which is
where (B / OSL) * T_pf comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from harness.errors import HarnessError, UsageError

TOLERANCE = 1e-6
ITERATIONS = 500

Array = np.ndarray
StepTime = Callable[[Array], Array]


@dataclass(frozen=True)
class ClosedLoop:
    """A closed loop of requests.

    isl, osl:       tokens in and out, at most
    range_ratio:    lengths are uniform from range_ratio * length to length (InferenceX: 0.8); 1: all alike,
                    then requests stay in step with each other
    prefill_tokens: of one step (SGLang's --chunked-prefill-size)
    waves:          prompts for each place, of which the first come all at once; 0: without end
    recv_interval:  decode steps between two looks for new requests (SGLang's --scheduler-recv-interval)
    """

    isl: int
    osl: int
    concurrency: int
    range_ratio: float = 0.8
    prefill_tokens: int = 8192
    waves: int = 0
    recv_interval: int = 1

    def __post_init__(self) -> None:
        least_of = {"isl": 1, "osl": 2, "concurrency": 1, "prefill_tokens": 1, "waves": 0, "recv_interval": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)} must be at least {least}")
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


@dataclass(frozen=True)
class ServingTimes:
    """Of one instance; arrays over draws.

    ttft:    of the steady state
    ttft_mean: over the whole run, its first wave included
    first_wave: mean end of its prefills after they all come at once, were they not cold, ms
    batch:   requests that decode together, on average
    stall:   of TPOT, what others' prefills take, ms
    decode:  one decode step, ms
    prefill: of one prompt, ms; those prefilled together share a step
    output:  tokens/s
    """

    tpot: Array
    ttft: Array
    ttft_mean: Array
    first_wave: Array
    output: Array
    batch: Array
    decode: Array
    stall: Array
    prefill: Array


def closed_loop(
    load: ClosedLoop,
    decode: StepTime,
    prefill: StepTime,
    host_ms: Array,
    most: Array | float = math.inf,
    cold_ms: Array | float = 0.0,
    cold_prefill: Array | float = 1.0,
) -> ServingTimes:
    """The steady state, and the mean over a run that begins with a cold first wave.

    decode:  batch to ms of a step
    prefill: prompts (of mean length, in one step) to ms
    host_ms: of a request outside the engine's steps: client, tokenisation, first answer
    most:    requests that KV memory holds, at least one
    cold_ms: what the first wave's requests wait beside their prefills: connections, batches of new sizes
    cold_prefill: how many times as long its prefills take

    Raises HarnessError where the iteration does not settle.
    """
    held = np.minimum(most * np.ones_like(host_ms), load.concurrency)
    fits = np.equal(held, load.concurrency)
    if load.range_ratio == 1.0 and fits.any():
        alike = _in_step(load, decode, prefill, host_ms, cold_ms, cold_prefill)
        if fits.all():
            return alike
        dispersed = _dispersed(load, decode, prefill, host_ms, held, cold_ms, cold_prefill)
        of_both = {
            f.name: np.where(fits, getattr(alike, f.name), getattr(dispersed, f.name))
            for f in fields(ServingTimes)
        }
        return ServingTimes(**of_both)
    return _dispersed(load, decode, prefill, host_ms, held, cold_ms, cold_prefill)


def _dispersed(
    load: ClosedLoop,
    decode: StepTime,
    prefill: StepTime,
    host_ms: Array,
    most: Array,
    cold_ms: Array | float,
    cold_prefill: Array | float,
) -> ServingTimes:
    """Requests that begin and end at times of their own; of these in flight `most` are decoded at once."""
    c, n = load.concurrency, load.mean_osl - 1
    others = (c - 1) / c
    batch = most.copy()
    together = np.ones_like(host_ms)
    change = math.inf
    for _ in range(ITERATIONS):
        step, whole = decode(batch), prefill(together)
        each = whole / together
        stall = batch / n * others * each
        tpot = step + stall
        # A prompt comes while a step runs, and waits for its end; after a prefill the engine looks at once.
        rate = batch / (n * tpot)
        busy = np.minimum(rate * each, 1.0)
        alone = (1 - batch / c) ** (c - 1)  # as no other decodes: then it waits for none
        wait = (1 - alone) * (busy * whole / 2 + (1 - busy) * step * load.recv_interval / 2)
        ttft = host_ms + wait + whole
        life = ttft + n * tpot
        new_batch = np.minimum(c * n * tpot / life, most)
        new_together = np.minimum(1 + rate * others * wait, load.most_together)
        change = float(
            max(np.max(np.abs(new_batch / batch - 1)), np.max(np.abs(new_together / together - 1)))
        )
        batch, together = (batch + new_batch) / 2, (together + new_together) / 2
        if change < TOLERANCE:
            break
    else:
        raise HarnessError(
            f"the batch at concurrency {c} does not settle: after {ITERATIONS} iterations it still moves by "
            f"{change:.1e}, about {float(np.mean(batch)):.3g}"
        )
    # Where memory holds fewer than come, the others wait in the queue: by Little's law.
    queued = np.where(batch < most, 0.0, np.maximum(c / rate - life, 0.0))
    life = life + queued
    steady = ttft + queued
    first_wave, _ = _wave(float(most[0]), load, prefill, host_ms)
    # Of the first wave a request waits half as long for memory, as the first of it find the cache empty.
    first = host_ms + cold_ms + cold_prefill * first_wave + queued / 2
    return ServingTimes(
        tpot=tpot,
        ttft=steady,
        ttft_mean=(first + (load.waves - 1) * steady) / load.waves if load.waves else steady,
        first_wave=first_wave,
        output=c * load.mean_osl / life * 1e3,
        batch=batch,
        decode=step,
        stall=stall,
        prefill=each,
    )


def _in_step(
    load: ClosedLoop,
    decode: StepTime,
    prefill: StepTime,
    host_ms: Array,
    cold_ms: Array | float,
    cold_prefill: Array | float,
) -> ServingTimes:
    """Requests of one length begin and end together: all prompts are prefilled, then all decode. Who is
    prefilled first waits for the others before its second token."""
    c, n = load.concurrency, load.mean_osl - 1
    mean, last = _wave(c, load, prefill, host_ms)
    batch = np.full_like(host_ms, c)
    step = decode(batch)
    stall = (last - mean) / n
    ttft = host_ms + mean
    cold = cold_ms + (cold_prefill - 1) * mean
    return ServingTimes(
        tpot=step + stall,
        ttft=ttft,
        ttft_mean=ttft + cold / load.waves if load.waves else ttft,
        first_wave=mean,
        output=c * load.mean_osl / (host_ms + last + n * step) * 1e3,
        batch=batch,
        decode=step,
        stall=stall,
        prefill=last / c,
    )


def _wave(count: float, load: ClosedLoop, prefill: StepTime, like: Array) -> tuple[Array, Array]:
    """Mean and last end of the prefills of `count` prompts that come at once, ms."""
    together = math.floor(load.most_together)
    full, left = divmod(count, together)
    whole = prefill(np.full_like(like, together))
    rest = prefill(np.full_like(like, left)) if left else np.zeros_like(like)
    last = full * whole + rest
    mean = (together * whole * full * (full + 1) / 2 + left * last) / count
    return mean, last
