"""Schedule of a run's steps: what a change of steps comes to in a request's times.

An engine that batches continuously makes one step after the other. In a step that prefills, the requests that
already decode get a token too. So a request's TTFT and TPOT are sums of steps, and their means over requests
are linear in the steps' times, with weights that the pattern of prefills gives:

    1 alone, then c-1 together:  TTFT = P1 + (c-1)/c P2,  TPOT = D + (P2 - D) / (c (out-1))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DECODE = 0
"""The step that prefills none; n stands for one that prefills n requests."""

Weights = Mapping[int, float]


@dataclass(frozen=True)
class Schedule:
    """ttft, tpot: of the mean over requests, how much of each kind of step is in it."""

    ttft: Weights
    tpot: Weights

    def of(self, quantity: str) -> Weights:
        return {"itl": {DECODE: 1.0}, "ttft": self.ttft, "tpot": self.tpot}[quantity]


@dataclass
class _Request:
    sent: Counter[int]
    tokens: int = 0
    first: Counter[int] = field(default_factory=Counter)
    last: Counter[int] = field(default_factory=Counter)


def schedule(pattern: Sequence[int], prompts: int, concurrency: int, outputs: int) -> Schedule:
    """pattern: how many requests each prefilling step took, in order; a request is sent as soon as fewer than
    `concurrency` are under way; each has `outputs` tokens. Steps of decode count alike, the last ones with
    fewer requests too. Raises ValueError where no run can have the pattern."""
    if sum(pattern) != prompts or min(pattern, default=0) < 1:
        raise ValueError(f"{prompts} requests are not prefilled {'+'.join(map(str, pattern)) or 'at all'}")
    passed: Counter[int] = Counter()
    requests: list[_Request] = []
    groups = list(pattern)
    while True:
        under_way = [request for request in requests if request.tokens < outputs]
        for _ in range(min(concurrency - len(under_way), prompts - len(requests))):
            requests.append(_Request(Counter(passed)))
        waiting = [request for request in requests if not request.tokens]
        decoding = [request for request in requests if 0 < request.tokens < outputs]
        admitted = waiting[: groups[0]] if groups and groups[0] <= len(waiting) else []
        if not admitted and not decoding:
            break
        passed[len(admitted)] += 1
        if admitted:
            groups.pop(0)
        for request in (*decoding, *admitted):
            request.tokens += 1
            request.last = Counter(passed)
            if request.tokens == 1:
                request.first = Counter(passed)
    if groups:
        raise ValueError(f"{concurrency} requests at once are never prefilled {groups[0]} together")
    return Schedule(
        _mean([_less(request.first, request.sent) for request in requests], 1),
        _mean([_less(request.last, request.first) for request in requests], max(outputs - 1, 1)),
    )


def _less(a: Counter[int], b: Counter[int]) -> Counter[int]:
    return Counter({kind: a[kind] - b[kind] for kind in a})


def _mean(counts: Sequence[Counter[int]], divided_by: int) -> Weights:
    kinds = {kind for count in counts for kind in count if count[kind]}
    return {kind: sum(count[kind] for count in counts) / len(counts) / divided_by for kind in sorted(kinds)}
