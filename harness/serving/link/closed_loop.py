"""A closed loop of requests: what TPOT and TTFT are made of, and their values for given constants.

A step either prefills or decodes, and waiting prompts come first (SGLang's schedule). So each prefill stalls
all that decode, and over the life of one request every other one is prefilled once:

    TPOT = a + k * decode + p * stall               stall = batch / (tokens out - 1) * prefill of one prompt
    TTFT = h + q * prefill + what it waits          and, over a whole run, its first wave of prompts

The constants a, k, p and h, q are one system's; see calibration.py, where the first wave's two are, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.errors import HarnessError
from harness.serving.link.kernel_sums import KernelSums
from harness.serving.link.load import Load

Array = np.ndarray
ROUNDS, SETTLED = 500, 1e-7


@dataclass(frozen=True)
class Features:
    """What the constants are multiplied with, at given TPOT and TTFT.

    tpot:    of a, k, p: 1, ms of a decode step, ms of stall
    steady:  of h, q, cold, each: TTFT after the first wave, as a client's median
    mean:    of the same constants: TTFT over the whole run
    waiting: ms of TTFT that no constant is of: for the end of a decode step, and for memory
    waiting_mean: the same over the whole run
    batch:   requests that decode together
    prefill_ms: of one prompt, by the kernels alone
    queue_ms: of `waiting`, what a request waits for memory
    """

    tpot: Array
    steady: Array
    mean: Array
    waiting: float
    waiting_mean: float
    batch: float
    decode_ms: float
    stall_ms: float
    prefill_ms: float
    queue_ms: float


def features(sums: KernelSums, tpot_ms: float, ttft_ms: float, cold: float) -> Features:
    """cold: how cold the first wave finds the server: 1, or 0 for one that has served before.

    ttft_ms: of the steady state
    """
    load = sums.load
    c, n = load.concurrency, load.mean_osl - 1
    others = (c - 1) / c
    free = c * n * tpot_ms / (ttft_ms + n * tpot_ms)
    batch = min(free, sums.capacity)
    one = sums.prefill_ms(1)
    mean, last = _wave(sums)
    if load.range_ratio == 1 and batch == free:
        # All in step: all prompts are prefilled, then all decode; an early one waits for the last.
        stall, waiting = (last - mean) / n, 0.0
        steady = np.array([1.0, mean, 0.0, 0.0])
        batch = float(c)
    else:
        rate = batch / (n * tpot_ms)  # of prompts, per ms
        stall = batch / n * others * one
        waiting = others * tpot_ms * load.recv_interval / 2
        residual = others * min(rate * one, 1.0) * one / 2  # of a prefill that runs when a prompt comes
        together = min(1 + rate * others * (waiting + residual), load.most_together)
        steady = np.array([1.0, sums.prefill_ms(together) + residual, 0.0, 0.0])
    waves = load.waves
    first = np.array([1.0, mean, cold, cold * (c + 1) / 2])
    queue = max(c / (batch / (n * tpot_ms)) - n * tpot_ms - ttft_ms, 0.0) if batch < free else 0.0
    return Features(
        tpot=np.array([1.0, sums.decode_ms(batch), stall]),
        steady=steady,
        mean=(first + (waves - 1) * steady) / waves,
        waiting=waiting + queue,
        # The first wave finds the memory empty: it waits half as long for it.
        waiting_mean=(waves - 1) / waves * (waiting + queue) + queue / 2 / waves,
        batch=batch,
        decode_ms=sums.decode_ms(batch),
        stall_ms=stall,
        prefill_ms=one,
        queue_ms=queue,
    )


def settled(sums: KernelSums, tpot: Array, ttft: Array, cold: float) -> Features:
    """The features at the TPOT and TTFT that they themselves lead to. tpot: a, k, p; ttft: h, q, cold, each.
    Raises HarnessError where they do not settle."""
    least = 0.05 * sums.decode_ms(1)  # a may be below zero
    tpot_ms = max(float(tpot @ [1.0, sums.decode_ms(sums.load.concurrency), 0.0]), least)
    ttft_ms = 0.0
    for _ in range(ROUNDS):
        found = features(sums, tpot_ms, ttft_ms, cold)
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


def cold_share(load: Load, engine: str, warm: bool) -> float:
    """How cold a first wave finds the server. With TensorRT-LLM InferenceX's first wave of 8192 tokens takes
    little more than its prefills, that of 1024 tokens 1 to 4 s more: prompts of 8192 are taken to find their
    kernels compiled."""
    if warm:
        return 0.0
    return max(1 - load.mean_isl / WARM_FROM.get(engine, math.inf), 0.0)


WARM_FROM = {"trtllm": 8192}
"""Tokens of a prompt that finds its kernels compiled, of engines that warm up with a long prompt."""


def _wave(sums: KernelSums) -> tuple[float, float]:
    """Mean and last end of the prefills of all prompts in flight when they come at once, ms."""
    count = sums.load.concurrency
    together = min(math.floor(sums.load.most_together), count)
    full, left = divmod(count, together)
    whole = sums.prefill_ms(together)
    last = full * whole + (sums.prefill_ms(left) if left else 0.0)
    mean = (together * whole * full * (full + 1) / 2 + left * last) / count
    return mean, last
