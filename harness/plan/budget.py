"""The time budget: read from text, and shared among cases."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from harness.errors import UsageError
from shapes.case import Case


def allowance(remaining_s: float, queue: Sequence[Case], min_s: float) -> tuple[float, int]:
    """The seconds of the remaining budget for the first case of the queue, and how many cases the budget
    reaches: as many as get `min_s` each, but at least one. They share it by weight."""
    reached = queue[: max(1, int(remaining_s // min_s))]
    share = remaining_s * queue[0].weight / (sum(case.weight for case in reached) or 1.0)
    return max(1e-3, min(remaining_s, max(min_s, share))), len(reached)


def parse_shard(text: str | None) -> tuple[int, int]:
    """The two numbers of a text such as `2/4`, the second of four parts; (1, 1) for None. Raises
    UsageError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text if text is not None else "1/1")
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text}: write 1/4 for the first of four parts")
    return int(match[1]), int(match[2])


def parse_seconds(text: str, option: str) -> float:
    """The seconds of a text such as `60`, `60s`, `5m` or `1h`. Raises UsageError, which names the option."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"cannot read {option} {text!r}; write for example 60s, 5m or 1h")
    return seconds
