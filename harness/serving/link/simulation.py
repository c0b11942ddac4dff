"""Requests one by one through an engine: what a client sees of a finite run.

The closed form of closed_loop.py is of a steady state. A run of a few waves has none: requests that came at
once end nearly together, so that prompts come in bursts and wait for each other.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.serving.link.closed_loop import Array, ClosedLoop

SEED = 20261125
WAVES = 10  # where a run has no end
StepMs = Callable[[float], float]


@dataclass(frozen=True)
class SimulatedRun:
    """ttft, tpot: of each request in the order of their coming, ms; duration: ms from the first coming to the
    last end; tokens: that came out"""

    ttft: Array
    tpot: Array
    duration: float
    tokens: int


def simulate(
    load: ClosedLoop,
    decode: StepMs,
    prefill: StepMs,
    host_ms: float,
    most: float = math.inf,
    cold_ms: float = 0.0,
    cold_prefill: float = 1.0,
) -> SimulatedRun:
    """A run of an engine whose step either prefills or decodes, and prefills first, as closed_loop.py has it.

    decode:  requests that decode to ms of a step; prefill: prompts of mean length in one step to ms
    The rest is as in `closed_loop`.
    """
    rng = np.random.default_rng(SEED)
    count = load.concurrency * (load.waves or WAVES)
    inputs = _lengths(rng, load.isl, load.range_ratio, count)
    outputs = np.maximum(_lengths(rng, load.osl, load.range_ratio, count), 2)
    sent, first = np.zeros(count), np.zeros(count)
    end = np.zeros(count)
    coming: list[tuple[float, int]] = []  # when the engine has it, which
    next_one = min(load.concurrency, count)
    for i in range(next_one):
        heapq.heappush(coming, (host_ms + cold_ms, i))
    waiting: deque[int] = deque()
    running: list[tuple[int, int]] = []  # the step that is its last, which
    now, steps, looked = 0.0, 0, 0

    def look() -> None:
        nonlocal looked
        looked = steps
        while coming and coming[0][0] <= now:
            waiting.append(heapq.heappop(coming)[1])

    while coming or waiting or running:
        if not running and not waiting:
            now = max(now, coming[0][0])
        if not running or steps - looked >= load.recv_interval:
            look()
        if waiting and len(running) < most:
            batch, tokens = [], 0
            while waiting and len(running) + len(batch) < most:
                if batch and tokens + inputs[waiting[0]] > load.prefill_tokens:
                    break
                tokens += int(inputs[waiting[0]])
                batch.append(waiting.popleft())
            cold = cold_prefill if batch[0] < load.concurrency else 1.0
            now += cold * prefill(tokens / load.mean_isl)
            for i in batch:
                first[i] = now - sent[i]
                heapq.heappush(running, (steps + int(outputs[i]) - 1, i))
            look()
            continue
        step = decode(len(running))
        whole = running[0][0] - steps
        if coming and len(running) < most:
            until = max(coming[0][0] - now, 0.0) / step
            # The first look that sees it, at the end of a step.
            looks = max(math.ceil((until + steps - looked) / load.recv_interval), 1)
            whole = min(whole, max(looked + looks * load.recv_interval - steps, 1))
        now += whole * step
        steps += whole
        while running and running[0][0] <= steps:
            _, i = heapq.heappop(running)
            end[i] = now
            if next_one < count:
                sent[next_one] = now
                heapq.heappush(coming, (now + host_ms, next_one))
                next_one += 1
    tpot = (end - sent - first) / (outputs - 1)
    return SimulatedRun(first, tpot, float(end.max()), int(outputs.sum()))


def _lengths(rng: np.random.Generator, most: int, ratio: float, count: int) -> Array:
    return rng.integers(max(1, round(most * ratio)), most, count, endpoint=True)
