"""Measured cases of a run, as the charts of a page need them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.page.document import Columns, anchor
from harness.report.rows import CaseResult
from harness.report.text import ratio_text, significant
from harness.results.comparison import Spread, spreads
from harness.results.journal import Journal
from harness.results.schema import Calibration, Cell, PlannedCase, Run, Verdict
from harness.statistics.paired import Comparison
from shapes.case import text_of


@dataclass(frozen=True)
class MeasuredCase(CaseResult):
    """A finished case with its run. `done` names the device where several devices measured the run."""

    folder: Path
    run: Run
    label: str
    """Names the run where a page has several runs of the op; else empty."""
    planned: PlannedCase
    calibrations: Sequence[Calibration]
    """Those of all devices of the run, where there are several."""
    spreads: Sequence[Spread]

    def row_name(self, cell: Cell) -> str:
        return f"{cell.name} · {self.label}" if self.label else cell.name

    def row_anchor(self, cell: Cell) -> str:
        return anchor(self.label, cell.case, cell.name)


def measured_cases(folder: Path, label: str = "") -> list[MeasuredCase]:
    """The finished cases of a run folder, in the order of measuring. Raises UsageError where it cannot be
    read."""
    journal = Journal(folder)
    run = journal.run()
    planned = {case.key: case for case in run.cases}
    several = len(journal.devices()) > 1
    calibrations = journal.calibrations() if several else []
    apart = spreads(calibrations)
    cases = []
    for key, records in journal.finished().items():
        of = CaseResult.of(records)
        if key in planned and of.cells:
            done = of.done if several else of.done.nameless
            about = (folder, run, label, planned[key], calibrations, apart)
            cases.append(MeasuredCase(of.cells, of.verdicts, done, *about))
    return cases


def interval_ends(value: float, low: float | None, high: float | None) -> tuple[float, float]:
    """The ends of an interval; the value itself where an end is missing or infinite, or has no logarithm."""
    if low is None or high is None or low <= 0 or math.isinf(high):
        return value, value
    return low, high


def ratio_mark(name: str, of: Verdict | Comparison | None) -> dict[str, Any]:
    """What a chart and its table show of a ratio; empty texts and None without one."""
    mark: dict[str, Any] = {"name": name, "ratio": None, "low": None, "high": None}
    if of and of.ratio is not None:
        low, high = interval_ends(of.ratio, of.low, of.high)
        mark |= {"ratio": of.ratio, "low": low, "high": high}
    return mark | {"text": verdict_text(of), "verdict": of.verdict if of else ""}


def us_text(us: float | None) -> str:
    return significant(us, 4)


TIMES: Columns = {
    "time, us": ("time_us", us_text), "from, us": ("low_us", us_text), "to, us": ("high_us", us_text),
}  # fmt: skip
"""The columns of a time and the ends of its interval."""


def verdict_text(verdict: Verdict | Comparison | None, is_baseline: bool = False) -> str:
    """The ratio with its interval; without a verdict `baseline` or an empty text."""
    if verdict:
        return ratio_text(verdict)
    return "baseline" if is_baseline else ""


def shared_sizes(cases: Sequence[MeasuredCase]) -> dict[str, int | str]:
    """The sizes that all cases have."""
    first = cases[0].planned.sizes
    return {k: v for k, v in first.items() if all(case.planned.sizes.get(k) == v for case in cases)}


def short_keys(cases: Sequence[MeasuredCase]) -> dict[str, str]:
    """Short names of cases of one op, by their keys: the sizes that not all of them have, and the
    boundary."""
    shared = shared_sizes(cases)
    keys = {}
    for case in cases:
        sizes = text_of({k: v for k, v in case.planned.sizes.items() if k not in shared})
        keys[case.planned.key] = " ".join(filter(None, [sizes, case.planned.boundary]))
    return keys
