"""Request times, as a client kept them: when each was sent, when each token came, what it answered."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import HarnessError
from harness.serving.clients import format
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import UnreadableError, read


class NoDetail(HarnessError):
    """A result without each request's times."""


@dataclass(frozen=True)
class TimedRequest:
    """sent: seconds; tokens: seconds at which each arrived, the first one first."""

    sent: float
    tokens: tuple[float, ...]

    def by(self, clock: Callable[[float], float]) -> TimedRequest:
        return TimedRequest(clock(self.sent), tuple(map(clock, self.tokens)))


@dataclass(frozen=True)
class RequestTimes:
    """Of the requests that succeeded, in the client's order; what the client did not keep is empty.

    dated: whether times are those of the client's clock, and not from when it began
    """

    requests: tuple[TimedRequest, ...]
    dated: bool = False
    input_lens: tuple[int, ...] = ()
    output_lens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()

    def by(self, clock: Callable[[float], float]) -> RequestTimes:
        """As an engine's own clock has it."""
        return replace(self, requests=tuple(request.by(clock) for request in self.requests))

    def means(self) -> dict[str, float]:
        """TTFT, TPOT (after the first token) and E2E in ms, and the duration in s. From each request's times
        and not from the client's own means, so that all clients count alike."""
        if not self.requests:
            return {}
        means = {
            "mean_ttft_ms": 1e3 * statistics.fmean(r.tokens[0] - r.sent for r in self.requests),
            "mean_e2e_ms": 1e3 * statistics.fmean(r.tokens[-1] - r.sent for r in self.requests),
            "duration_s": max(r.tokens[-1] for r in self.requests) - min(r.sent for r in self.requests),
        }
        many = [r.tokens for r in self.requests if len(r.tokens) > 1]
        after = [(tokens[-1] - tokens[0]) / (len(tokens) - 1) for tokens in many]
        return means | ({"mean_tpot_ms": 1e3 * statistics.fmean(after)} if after else {})


def request_times(result: Path) -> RequestTimes:
    """Of the last run in a client's file that has `ttfts` and `itls`, as vLLM's and SGLang's have. Raises
    NoDetail."""
    try:
        rows = read(result).rows()
    except UnreadableError as error:
        raise NoDetail(f"no request's times in {result}: {error}") from None
    if not rows or not isinstance(rows[-1], Mapping):
        raise NoDetail(f"no request's times in {result}: an object is wanted")
    if missing := [key for key in ("ttfts", "itls") if key not in rows[-1]]:
        raise NoDetail(f"no request's times in {result}: no {' and no '.join(missing)} in it")
    row = Fields(str(result), rows[-1])
    samples, _ = format.requests(row)
    if row.findings:
        raise NoDetail(f"no request's times in {row.findings[0].message}")
    # A client that keeps no start times sends all at once where that is what it was asked for.
    starts = samples.starts_s or (0.0,) * len(samples.ttfts_ms)
    requests = tuple(map(_request, starts, samples.ttfts_ms, samples.itls_ms))
    dated = bool(samples.starts_s)
    return RequestTimes(requests, dated, samples.input_lens, samples.output_lens, samples.texts)


def _request(start: float, ttft_ms: float, itls_ms: Sequence[float]) -> TimedRequest:
    gaps = (gap / 1e3 for gap in itls_ms)
    return TimedRequest(start, tuple(itertools.accumulate(gaps, initial=start + ttft_ms / 1e3)))
