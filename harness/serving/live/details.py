"""What a client kept of each request: when it was sent, when each token came, what it answered."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness import archive
from harness.errors import HarnessError


class NoDetail(HarnessError):
    """A result without each request's times."""


@dataclass(frozen=True)
class Request:
    """sent: seconds; tokens: seconds at which each arrived, the first one first."""

    sent: float
    tokens: tuple[float, ...]

    def by(self, clock: Callable[[float], float]) -> Request:
        return Request(clock(self.sent), tuple(map(clock, self.tokens)))


@dataclass(frozen=True)
class Details:
    """Of the requests that succeeded, in the client's order; what the client did not keep is empty.

    dated: whether times are those of the client's clock, and not from when it began
    """

    requests: tuple[Request, ...]
    dated: bool = False
    input_lens: tuple[int, ...] = ()
    output_lens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()

    def by(self, clock: Callable[[float], float]) -> Details:
        """As an engine's own clock has it."""
        return replace(self, requests=tuple(request.by(clock) for request in self.requests))

    def means(self) -> dict[str, float]:
        """TTFT, TPOT (after the first token) and E2E in ms, and the duration in s. From each request's times
        and not from the client's own means, so that all clients count alike."""
        if not self.requests:
            return {}
        found = {
            "mean_ttft_ms": 1e3 * statistics.fmean(r.tokens[0] - r.sent for r in self.requests),
            "mean_e2e_ms": 1e3 * statistics.fmean(r.tokens[-1] - r.sent for r in self.requests),
            "duration_s": max(r.tokens[-1] for r in self.requests) - min(r.sent for r in self.requests),
        }
        many = [r.tokens for r in self.requests if len(r.tokens) > 1]
        after = [(tokens[-1] - tokens[0]) / (len(tokens) - 1) for tokens in many]
        return found | ({"mean_tpot_ms": 1e3 * statistics.fmean(after)} if after else {})


def details(result: Path) -> Details:
    """Of a vLLM (JSON) or SGLang (JSONL, the last line) client's file with details. Raises NoDetail."""
    try:
        text = archive.read_bytes(result).decode().strip()
        content = json.loads(text if text[1:2].isspace() or "\n" not in text else text.splitlines()[-1])
        ttfts, itls = content["ttfts"], content["itls"]
        count = len(ttfts)
        # A client that keeps no start times sends all at once where that is what it was asked for.
        dated = bool(content.get("start_times"))
        starts = content["start_times"] if dated else [0.0] * count
        good = [i for i, error in enumerate(content.get("errors") or [""] * count) if not error]
        requests = []
        for i in good:
            times = [starts[i] + ttfts[i]]
            for gap in itls[i]:
                times.append(times[-1] + gap)
            requests.append(Request(starts[i], tuple(times)))
        lists = (content.get(key) or [] for key in ("input_lens", "output_lens", "generated_texts"))
        kept = (tuple(one[i] for i in good) if len(one) == count else () for one in lists)
        return Details(tuple(requests), dated, *kept)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise NoDetail(f"no request's times in {result}: {type(error).__name__}: {error}") from None
