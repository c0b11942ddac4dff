"""Spread: how far devices of one type lie apart, by what each measured of the same cases.

Devices are compared within a pass, first or last, as those of a pass worked side by side; then passes are
pooled. All that is said of a type holds together at the confidence of its calibrations (Bonferroni), where
noise is normal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.results.schema import Calibration
from harness.statistics.independent import measured, pooled, quotient, widened
from harness.statistics.intervals import CONFIDENCE, students_t
from harness.statistics.paired import Comparison

LAG = 0.02
"""A device lags, or has drifted, where its interval lies beyond so much: less is in nobody's way."""
NOISY = 0.05
"""Devices that were not told apart and may differ by more were measured too noisily to tell."""


@dataclass(frozen=True)
class DeviceRatio:
    """Of a device's times of a calibrated case; > 1: slower."""

    device: str
    case: str
    comparison: Comparison


@dataclass(frozen=True)
class Spread:
    """Of the devices of a type.

    to_median: of each device and case its time over that of the median device, whose own ratio is 1
    drifts:    of each device and case its last time over its first
    widest:    the largest ratio of the times that two of them took for one case, and its interval
    """

    type: str
    devices: Sequence[str]
    to_median: Sequence[DeviceRatio]
    drifts: Sequence[DeviceRatio]
    widest: Comparison

    @property
    def verdict(self) -> Literal["apart", "alike", "noisy"]:
        if self.widest.low > 1:
            return "apart"
        return "alike" if self.widest.high <= 1 + NOISY else "noisy"

    @property
    def most(self) -> float:
        """By how much two of them may differ, as a share: the upper end, so that noise hides nothing."""
        return self.widest.high - 1

    @property
    def lagging(self) -> list[DeviceRatio]:
        return [ratio for ratio in self.to_median if ratio.comparison.low > 1 + LAG]

    @property
    def drifted(self) -> list[DeviceRatio]:
        beyond = 1 + LAG
        return [r for r in self.drifts if r.comparison.low > beyond or r.comparison.high < 1 / beyond]


def spreads(calibrations: Iterable[Calibration]) -> list[Spread]:
    """Of each type of which two devices or more measured the same case."""
    types: dict[str, list[Calibration]] = {}
    for calibration in calibrations:
        types.setdefault(calibration.type, []).append(calibration)
    return [found for type, made in types.items() if (found := _spread(type, made))]


Times = Mapping[str, Comparison]
"""Of the devices, by name."""


def _spread(type: str, calibrations: Sequence[Calibration]) -> Spread | None:
    passes = _passes(calibrations)
    devices = list(dict.fromkeys(calibration.device for calibration in calibrations))
    pairs = {
        (case, a, b): ratio
        for case, of_case in passes.items()
        for a, b in itertools.permutations(devices, 2)
        if (ratio := _ratio(list(of_case.values()), a, b))
    }
    if not pairs:
        return None
    each = 1 - (1 - CONFIDENCE) / (len(pairs) / 2)
    wider = students_t(math.inf, each) / students_t(math.inf, CONFIDENCE)
    pairs = {key: widened(ratio, wider) for key, ratio in pairs.items()}
    to_median = []
    for case, of_case in passes.items():
        median = _median_device(list(of_case.values()))
        ratios = {median: Comparison(1.0, 1.0, 1.0, "same")}
        ratios |= {a: ratio for (of, a, b), ratio in pairs.items() if (of, b) == (case, median)}
        to_median += [DeviceRatio(name, case, ratios[name]) for name in devices if name in ratios]
    drifts = [
        DeviceRatio(name, case, widened(quotient(of_case["last"][name], of_case["first"][name]), wider))
        for case, of_case in passes.items()
        for name in devices
        if all(name in of_case.get(when, {}) for when in ("first", "last"))
    ]
    return Spread(type, devices, to_median, drifts, _widest(pairs.values()))


def _passes(calibrations: Iterable[Calibration]) -> dict[str, dict[str, Times]]:
    """Times by case and by pass; a run that was resumed has several first ones of a device."""
    made: dict[str, dict[str, dict[str, list[Comparison]]]] = {}
    for c in calibrations:
        times = made.setdefault(c.case, {}).setdefault(c.when, {}).setdefault(c.device, [])
        times.append(measured(c.time_us, c.low_us, c.high_us))
    return {
        case: {when: {name: pooled(of) for name, of in times.items()} for when, times in of_case.items()}
        for case, of_case in made.items()
    }


def _ratio(passes: Sequence[Times], a: str, b: str) -> Comparison | None:
    """a's time over b's; None where no pass has both."""
    ratios = [quotient(times[a], times[b]) for times in passes if a in times and b in times]
    return pooled(ratios) if ratios else None


def _median_device(passes: Sequence[Times]) -> str:
    """Of an even number the faster of the two in the middle."""
    names = dict.fromkeys(name for times in passes for name in times)
    by_time = sorted(names, key=lambda name: pooled([t[name] for t in passes if name in t]).ratio)
    return by_time[(len(by_time) - 1) // 2]


def _widest(pairs: Iterable[Comparison]) -> Comparison:
    """The largest of several ratios, each of which is there the other way round too: it lies between the
    largest of their lower ends, at least 1, and of their upper ends."""
    several = list(pairs)
    ratio, low, high = (max(getattr(one, end) for one in several) for end in ("ratio", "low", "high"))
    return Comparison(ratio, max(1.0, low), high, "unclear")
