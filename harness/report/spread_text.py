"""The spread of a run's devices in words: how far they lie apart, which lags, which drifted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from harness.report.text import uncertain_ratio
from harness.results.spread import DeviceRatio, Spread
from harness.statistics.paired import Comparison


def spread_lines(spreads: Iterable[Spread]) -> list[str]:
    """A line for each type, and one for each device that lags or drifted."""
    return [line for spread in spreads for line in _lines(spread)]


def _lines(spread: Spread) -> Iterator[str]:
    yield f"{len(spread.devices)} devices of type {spread.type} {apart(spread)}"
    for worst in _of_each(spread.lagging):
        yield f"{worst.device} lags: {_times(worst.comparison)} the median device's time of {worst.case}"
    for worst in _of_each(spread.drifted):
        yield f"{worst.device} drifted: {_times(worst.comparison)} its first time of {worst.case} at the end"


def apart(spread: Spread) -> str:
    """What is known of them, as a predicate."""
    if spread.verdict == "apart":
        return f"lie apart: the slowest takes {_times(spread.widest)} the time of the fastest"
    if spread.verdict == "alike":
        return f"are alike within {spread.most:.1%}"
    return f"were measured too noisily to tell apart: they may differ by up to {spread.most:.1%}"


def _of_each(ratios: Sequence[DeviceRatio]) -> list[DeviceRatio]:
    """Of each device's cases that where it is furthest off."""
    worst: dict[str, DeviceRatio] = {}
    for ratio in sorted(ratios, key=lambda r: max(r.comparison.ratio, 1 / r.comparison.ratio)):
        worst[ratio.device] = ratio
    return list(worst.values())


def _times(ratio: Comparison) -> str:
    return " ".join(uncertain_ratio(ratio.ratio, ratio.low, ratio.high)).rstrip()
