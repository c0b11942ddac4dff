"""Requests one by one through an engine: what a client sees of a finite run, its tail and its bursts.

The closed form of closed_loop.py is of a steady state. It has no percentiles, and no requests that come at a
rate of their own, whoever is served.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import UsageError
from harness.serving.link.closed_loop import Array, ClosedLoop

SEED = 20261125
WAVES = 10  # where a run has no end
MOST_REQUESTS = 10_000  # of a run: more take longer than anybody waits


@dataclass(frozen=True)
class OpenLoop(ClosedLoop):
    """Requests that come at a rate; `concurrency` is the most that the engine takes at once.

    rate:       requests/s; burstiness: shape of the gamma law of the gaps between them, 1: Poisson's, more is
                evener (vLLM's --burstiness); ramp_from: the rate of the first, if they begin at another one
    requests:   of the run
    """

    rate: float = 1.0
    burstiness: float = 1.0
    ramp_from: float = 0.0
    requests: int = 1000

    def __post_init__(self) -> None:
        # Before what is at most in flight, which is as many where the user says nothing else.
        if not 1 <= self.requests <= MOST_REQUESTS:
            raise UsageError(f"requests={self.requests} must be from 1 to {MOST_REQUESTS}")
        super().__post_init__()
        for name in ("rate", "burstiness"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name):g} must be above 0 and finite")
        if not 0 <= self.ramp_from < math.inf:
            raise UsageError(f"ramp_from={self.ramp_from:g} must be a number from 0 on")


@dataclass(frozen=True)
class SimulatedRun:
    """ttft, tpot: of each request in the order of their coming, ms; duration: ms from the first coming to the
    last end; tokens: that came out; batch: requests that decoded together, on average"""

    ttft: Array
    tpot: Array
    duration: float
    tokens: int
    batch: float

    @property
    def falls_behind(self) -> bool:
        """Whether requests waited the longer the later they came."""
        quarter = max(len(self.ttft) // 4, 1)
        late, early = np.median(self.ttft[-quarter:]), np.median(self.ttft[quarter : 2 * quarter])
        return bool(late > 2 * early)


def requests_of(load: ClosedLoop) -> int:
    """Of a whole run."""
    return load.requests if isinstance(load, OpenLoop) else load.concurrency * (load.waves or WAVES)


def simulate(
    load: ClosedLoop,
    decode: Sequence[float],
    prompts: Array,
    prefill: Array,
    host_ms: float,
    most: float = math.inf,
    cold_ms: float = 0.0,
    cold_prefill: float = 1.0,
    seed: int = 0,
) -> SimulatedRun:
    """A run of an engine whose step either prefills or decodes, and prefills first, as closed_loop.py has it.

    decode:  ms of a step of 1, 2, 3 ... requests; prefill: of one of so many prompts of mean length, at
             `prompts`, their logarithms
    seed:    of lengths and of the gaps between requests
    The rest is as in `closed_loop`.
    """
    rng = np.random.default_rng([SEED, seed])
    comes = isinstance(load, OpenLoop)
    count = requests_of(load)
    # Lists: an array gives one value in three times the time.
    inputs = _lengths(rng, load.isl, load.range_ratio, count).tolist()
    outputs = np.maximum(_lengths(rng, load.osl, load.range_ratio, count), 2).tolist()
    sent = _sent(rng, load).tolist() if isinstance(load, OpenLoop) else [0.0] * count
    first, end = [0.0] * count, [0.0] * count
    mean_isl = load.mean_isl
    knots, values = prompts.tolist(), prefill.tolist()
    next_request = count if comes else min(load.concurrency, count)
    cold_wave = 0 if comes else load.concurrency
    most = math.floor(min(most, load.concurrency))
    coming = [(sent[i] + host_ms + (cold_ms if i < cold_wave else 0.0), i) for i in range(next_request)]
    heapq.heapify(coming)  # when the engine has it, which
    waiting: deque[int] = deque()
    running: list[tuple[int, int]] = []  # the step that is its last, which
    now, steps, looked, decoded = 0.0, 0, 0, 0

    def look() -> None:
        nonlocal looked
        looked = steps
        while coming and coming[0][0] <= now:
            waiting.append(heapq.heappop(coming)[1])

    while coming or waiting or running:
        if not running and not waiting:
            now = max(now, coming[0][0])
        # Looks go on at their interval while nobody comes.
        looked += (steps - looked) // load.recv_interval * load.recv_interval
        if not running or looked == steps:
            look()
        if waiting and len(running) < most:
            batch: list[int] = []
            tokens = 0
            while waiting and len(running) + len(batch) < most:
                if batch and tokens + inputs[waiting[0]] > load.prefill_tokens:
                    break
                tokens += inputs[waiting[0]]
                batch.append(waiting.popleft())
            cold = cold_prefill if batch[0] < cold_wave else 1.0
            together = tokens / mean_isl
            now += cold * min(together, 1.0) * _between(math.log(together), knots, values)
            for i in batch:
                first[i] = now - sent[i]
                heapq.heappush(running, (steps + outputs[i] - 1, i))
            look()
            continue
        step = decode[len(running) - 1]
        whole = running[0][0] - steps
        if coming and len(running) < most:
            until = max(coming[0][0] - now, 0.0) / step
            # The first look that sees it, at the end of a step.
            looks = max(math.ceil((until + steps - looked) / load.recv_interval), 1)
            whole = min(whole, max(looked + looks * load.recv_interval - steps, 1))
        now += whole * step
        steps += whole
        decoded += whole * len(running)
        while running and running[0][0] <= steps:
            _, i = heapq.heappop(running)
            end[i] = now
            if next_request < count:
                sent[next_request] = now
                heapq.heappush(coming, (now + host_ms, next_request))
                next_request += 1
    ttft = np.array(first)
    tpot = (np.array(end) - np.array(sent) - ttft) / (np.array(outputs) - 1)
    return SimulatedRun(ttft, tpot, max(end), sum(outputs), decoded / max(steps, 1))


def _between(x: float, knots: Sequence[float], values: Sequence[float]) -> float:
    """np.interp of one point, of which that would spend most of its time on what it is given."""
    right = bisect_right(knots, x)
    if right in (0, len(knots)):
        return values[max(right - 1, 0)]
    left = right - 1
    share = (x - knots[left]) / (knots[right] - knots[left])
    return values[left] + share * (values[right] - values[left])


def _sent(rng: np.random.Generator, load: OpenLoop) -> Array:
    """ms; the rate grows from ramp_from, where there is one, to its own by the last request."""
    rates = np.linspace(load.ramp_from or load.rate, load.rate, load.requests)
    gaps = rng.gamma(load.burstiness, 1 / load.burstiness, load.requests) / rates
    return 1e3 * (np.cumsum(gaps) - gaps[0])


def _lengths(rng: np.random.Generator, most: int, ratio: float, count: int) -> Array:
    return rng.integers(max(1, round(most * ratio)), most, count, endpoint=True)
