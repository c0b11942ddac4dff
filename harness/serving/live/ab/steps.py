"""Steps of an engine during a run, from when each token arrived: who was prefilled with whom, and how long a
step of pure decode took while all requests decoded.

TTFT and TPOT follow from scheduling as much as from kernels: one request prefilled alone and three together
give other means than four together, with the same kernels. The time between tokens while nobody is prefilled
and the batch is full is the decode step itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.serving.live.client.request_times import TimedRequest

RAMP_STEPS = 2  # left out after the batch is full


@dataclass(frozen=True)
class RunSteps:
    """itl_ms:        mean of the steady steps' inter-token times
    itl_median_ms: their median, which a single stall does not move
    steady:        how many steady inter-token times there were, of all requests
    pattern:       how many requests were prefilled together, in order
    prefill_ms:    from the time before (the first one sent, or the prefill before ended) to each group's
                   first tokens
    batch:         mean number of requests in a decode step: tokens that decode made, over its steps
    kv_len:        mean length of a request's cache over the steady steps; None where lengths are not known
    """

    itl_ms: float | None
    itl_median_ms: float | None
    steady: int
    pattern: tuple[int, ...]
    prefill_ms: tuple[float, ...]
    batch: float
    kv_len: float | None

    def facts(self) -> dict[str, Any]:
        return {
            "steady_itl_ms": self.itl_ms,
            "steady_itl_median_ms": self.itl_median_ms,
            "steady_intervals": self.steady,
            "prefill_pattern": list(self.pattern),
            **{f"prefill_{i}_ms": ms for i, ms in enumerate(self.prefill_ms, 1)},
            "decoding_batch": self.batch,
            "mean_kv_len": self.kv_len,
        }


def steps(
    requests: Sequence[TimedRequest],
    concurrency: int,
    input_lens: Sequence[int] = (),
    until: float = math.inf,
) -> RunSteps:
    """concurrency: how many decode together when the batch is full
    until:       steps that end later are not steady
    """
    groups = _prefilled_together(requests)
    first = min((r.sent for r in requests), default=0.0)
    ends = [max(r.tokens[0] for r in group) for group in groups]
    befores = [first, *ends][: len(ends)]
    prefills = [
        1e3 * (end - max(before, min(r.sent for r in group)))
        for group, before, end in zip(groups, befores, ends, strict=True)
    ]
    gaps, kv = _steady(requests, concurrency, input_lens, until)
    return RunSteps(
        itl_ms=1e3 * statistics.fmean(gaps) if gaps else None,
        itl_median_ms=1e3 * statistics.median(gaps) if gaps else None,
        steady=len(gaps),
        pattern=tuple(len(group) for group in groups),
        prefill_ms=tuple(prefills),
        batch=_decoding_batch(requests),
        kv_len=statistics.fmean(kv) if kv else None,
    )


def _prefilled_together(requests: Sequence[TimedRequest]) -> list[list[TimedRequest]]:
    """First tokens that arrive within half a decode step of each other came from one step."""
    apart = _half_a_step(requests)
    groups: list[list[TimedRequest]] = []
    for request in sorted(requests, key=lambda r: r.tokens[0]):
        if groups and request.tokens[0] - groups[-1][-1].tokens[0] <= apart:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def _decoding_batch(requests: Sequence[TimedRequest]) -> float:
    apart = _half_a_step(requests)
    made = sorted(at for r in requests for at in r.tokens[1:])
    if not made:
        return 0.0
    return len(made) / (1 + sum(b - a > apart for a, b in pairwise(made)))


def _half_a_step(requests: Sequence[TimedRequest]) -> float:
    gaps = [b - a for r in requests for a, b in pairwise(r.tokens)]
    return statistics.median(gaps) / 2 if gaps else 0.0


def _steady(
    requests: Sequence[TimedRequest], concurrency: int, input_lens: Sequence[int], until: float
) -> tuple[list[float], list[float]]:
    """Inter-token times during which `concurrency` requests decode and none waits for its first token, and
    the tokens in the cache then."""
    gaps: list[float] = []
    lengths: list[float] = []
    for start, end in _full_windows(requests, concurrency):
        for i, request in enumerate(requests):
            inside = [n for n, at in enumerate(request.tokens) if start <= at <= min(end, until)]
            for n in inside[RAMP_STEPS:-1]:
                gaps.append(request.tokens[n + 1] - request.tokens[n])
                if len(input_lens) == len(requests):
                    lengths.append(input_lens[i] + n + 1)
    return gaps, lengths


def _full_windows(requests: Sequence[TimedRequest], concurrency: int) -> list[tuple[float, float]]:
    changes: list[tuple[float, int, int]] = []
    for request in requests:
        changes.append((request.sent, 0, 1))
        changes.append((request.tokens[0], 1, -1))
        changes.append((request.tokens[-1], -1, 0))
    changes.sort()
    windows, decoding, waiting, since = [], 0, 0, None
    for at, more, wait in changes:
        decoding, waiting = decoding + more, waiting + wait
        full = decoding == concurrency and waiting == 0
        if full and since is None:
            since = at
        elif not full and since is not None:
            windows.append((since, at))
            since = None
    return windows
