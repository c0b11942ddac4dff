"""Agreement of an arm's answers with the base's: with the same prompts and no sampling, the same function
gives the same words until rounding tips a near tie. A kernel that computes something else is off from the
start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from harness.serving.live.client.request_times import request_times

# Random weights give close ties: after a few words most answers have parted, each for good.
LEAST_SECOND = 0.5


@dataclass(frozen=True)
class Agreement:
    """requests: compared; prefix: mean words before the answers part; first, second: share of requests whose
    first word (of prefill), and first two words (of a decode step too), agree."""

    requests: int
    prefix: float
    first: float
    second: float

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"suspect": self.suspect}

    @property
    def suspect(self) -> bool:
        return self.second < LEAST_SECOND


def agreement(pairs: Sequence[tuple[Path, Path]]) -> Agreement | None:
    """Of the result files of pairs of runs. None where the client keeps no texts."""
    prefixes = [
        sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(a.split(), b.split(), strict=False)))
        for base, arm in pairs
        for a, b in zip(request_times(base).texts, request_times(arm).texts, strict=False)
    ]
    if not prefixes:
        return None
    count = len(prefixes)
    return Agreement(
        count,
        sum(prefixes) / count,
        sum(n >= 1 for n in prefixes) / count,
        sum(n >= 2 for n in prefixes) / count,
    )
