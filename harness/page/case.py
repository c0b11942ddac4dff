"""Measured cases of a run, and what several charts of a page show of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.page.document import Columns, anchor
from harness.page.style import provider
from harness.report.rows import CaseResult, Row
from harness.report.text import grouped, ratio_text, significant, unit
from harness.results.comparison import Spread, spreads
from harness.results.journal import Journal
from harness.results.schema import Calibration, Cell, PlannedCase, Run, Verdict
from harness.statistics.paired import Comparison
from shapes.case import text_of

FEW = 8  # up to so many rows are all shown in a chart; of more a reader has to choose
FAR = 5.0
"""Rows that take more than this many times as long as the fastest are shown only if a reader chooses them."""


@dataclass(frozen=True)
class MeasuredCase(CaseResult):
    """A finished case with its run. The device in `done` is empty if one device measured the whole run."""

    folder: Path  # of the run
    run: Run
    label: str  # names the run where a page has several runs of the op; else empty
    planned: PlannedCase
    calibrations: Sequence[Calibration]  # of all devices of the run; empty where one device measured it
    spreads: Sequence[Spread]  # from the calibrations

    @property
    def size_order(self) -> tuple[list[int], ...]:
        """The key that sorts the cases of an op by their sizes: the numbers in each; a range has two."""
        sizes = self.planned.sizes.values()
        return tuple([int(number) for number in re.findall(r"\d+", str(size))] for size in sizes)

    def named(self, text: str) -> str:
        """The text with the label of the run, if there is one."""
        return f"{text} · {self.label}" if self.label else text

    def row_anchor(self, cell: Cell) -> str:
        return anchor(self.label, cell.case, cell.name)


def measured_cases(folder: Path, label: str = "") -> list[MeasuredCase]:
    """The finished cases of a run folder, in the order of measuring. Raises UsageError."""
    journal = Journal(folder)
    run = journal.run()
    planned = {case.key: case for case in run.cases}
    several = len(journal.devices()) > 1
    calibrations = journal.calibrations() if several else []
    of_run: dict[str, Any] = {"folder": folder, "run": run, "label": label, "calibrations": calibrations,
              "spreads": spreads(calibrations)}  # fmt: skip
    cases = []
    for key, records in journal.finished().items():
        case = CaseResult.of(records)
        if key in planned and case.cells:
            done = case.done if several else case.done.nameless
            cases.append(MeasuredCase(case.cells, case.verdicts, done, planned=planned[key], **of_run))
    return cases


def interval_ends(value: float, low: float | None, high: float | None) -> tuple[float, float]:
    """The ends of an interval; the value itself where an end is missing or infinite, or has no logarithm."""
    if low is None or high is None or low <= 0 or math.isinf(high):
        return value, value
    return low, high


def ratio_data(name: str, comparison: Verdict | Comparison | None) -> dict[str, Any]:
    """The data of a ratio for a chart and its table; without one texts are empty and numbers None."""
    text, verdict = (ratio_text(comparison), comparison.verdict) if comparison else ("", "")
    ratio = low = high = None
    if comparison and comparison.ratio is not None:
        ratio = comparison.ratio
        low, high = interval_ends(ratio, comparison.low, comparison.high)
    return {"name": name, "ratio": ratio, "low": low, "high": high, "text": text, "verdict": verdict}


def four_digits(value: float | None) -> str:
    return significant(value, 4)


def add_times_in_unit(rows: Sequence[dict[str, Any]]) -> tuple[str, Columns]:
    """Adds to rows that have `time_us`, `low_us` and `high_us` the same times as `time`, `time_low` and
    `time_high`, in the unit of the smallest time. Returns the unit's name and the three columns."""
    common = unit(min((row["time_us"] for row in rows if row["time_us"]), default=1.0))
    keys = {"time": "time_us", "time_low": "low_us", "time_high": "high_us"}
    for row in rows:
        for key, key_us in keys.items():
            row[key] = None if row[key_us] is None else round(row[key_us] / common.us, 6)
    titles = (f"time, {common.name}", "from", "to")
    return common.name, {title: (key, four_digits) for title, key in zip(titles, keys, strict=True)}


def shown_rows(cases: Sequence[MeasuredCase]) -> set[str]:
    """The names of the rows that charts show first: all if they are few; else the best row of each provider,
    and the best of each implementation that an engine runs by default."""
    logs_of: dict[str, list[float]] = {}  # by name, for each case, the logarithm of the ratio to the fastest
    of_defaults: dict[str, list[str]] = {}  # by implementation that an engine runs by default the names
    for case in cases:
        for cell in case.timed:
            ratio = (cell.time_us or 1.0) / (case.timed[0].time_us or 1.0)
            logs_of.setdefault(cell.name, []).append(math.log(ratio))
            if case.engines_of(cell):
                of_defaults.setdefault(cell.impl, []).append(cell.name)
    if len(logs_of) <= FEW:
        return set(logs_of)

    def rank(name: str) -> tuple[int, float]:
        """Rows with a time in more cases are better, then those with the smaller mean."""
        return -len(logs_of[name]), sum(logs_of[name]) / len(logs_of[name])

    of_providers = grouped(logs_of, provider)
    return {min(names, key=rank) for names in (*of_providers.values(), *of_defaults.values())}


def slow_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence that names the rows whose largest `ratio` to the fastest is above FAR; empty if none is."""
    # By name: a larger ratio comes later and replaces the smaller ones.
    largest = {row["name"]: row["ratio"] for row in sorted(rows, key=lambda row: row["ratio"])}
    far = [f"{name} ({significant(ratio, 2)}x)" for name, ratio in largest.items() if ratio > FAR]
    return f"Not drawn, at more than {FAR:.0f}x the fastest: {', '.join(far)}." if far else ""


def not_shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sentences on the rows that are not `shown` until a reader chooses them; empty if there are none."""
    if all(row["shown"] for row in rows):
        return ""
    sentences = [slow_rows(rows)]
    if len({row["name"] for row in rows}) > FEW:
        sentences.append("Of many rows the best of each provider and the engines' defaults are shown.")
    return " " + " ".join(filter(None, [*sentences, "Choose others below the picture."]))


def verdict_text(row: Row) -> str:
    """The ratio to the baseline with its interval; without a verdict `baseline` or an empty text."""
    if row.verdict:
        return ratio_text(row.verdict)
    return "baseline" if row.is_baseline else ""


def shared_sizes(cases: Sequence[MeasuredCase]) -> dict[str, int | str]:
    """The sizes that all cases have."""
    first = cases[0].planned.sizes
    return {k: v for k, v in first.items() if all(case.planned.sizes.get(k) == v for case in cases)}


def short_keys(cases: Sequence[MeasuredCase]) -> dict[str, str]:
    """A short name by the key of each case: the sizes in which the cases differ, and the boundary."""
    shared = shared_sizes(cases)
    short = {}
    for planned in (case.planned for case in cases):
        own_sizes = text_of({name: size for name, size in planned.sizes.items() if name not in shared})
        short[planned.key] = f"{own_sizes} {planned.boundary}".lstrip()
    return short
