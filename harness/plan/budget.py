"""The time budget: read from text, and shared among cases."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from harness.errors import UsageError
from shapes.case import Case


def allowance(remaining_s: float, queue: Sequence[Case], min_s: float) -> tuple[float, int]:
    """The seconds of the remaining budget for the first case of the queue, and how many cases the budget
    reaches: as many as can get `min_s` each, but at least one. The cases that it reaches share it by weight.
    The first one gets at least `min_s`, or all that remains if that is less, but never under 1 ms."""
    reached = queue[: max(1, int(remaining_s // min_s))]
    total_weight = sum(case.weight for case in reached)
    share_s = remaining_s * queue[0].weight / total_weight if total_weight else 0.0
    first_s = min(remaining_s, max(min_s, share_s))
    return max(1e-3, first_s), len(reached)


def parse_shard(text: str | None) -> tuple[int, int]:
    """Which part it is, and of how many: (2, 4) for `2/4`, (1, 1) for None. Raises UsageError."""
    match = re.fullmatch(r"(\d+)/(\d+)", "1/1" if text is None else text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text}: write 1/4 for the first of four parts")
    return int(match[1]), int(match[2])


def parse_seconds(text: str, option: str) -> float:
    """The seconds of a text such as `60`, `60s`, `5m` or `1h`. Raises UsageError, which names the option."""
    units = {"s": 1, "m": 60, "h": 3600}
    unit = text[-1:] if text[-1:] in units else "s"
    try:
        seconds = float(text.removesuffix(unit)) * units[unit]
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"cannot read {option} {text!r}; write for example 60s, 5m or 1h")
    return seconds
