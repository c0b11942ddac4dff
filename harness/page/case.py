"""Measured cases of a run, as the charts of a page need them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.page.document import Columns, anchor
from harness.page.style import provider
from harness.report.rows import CaseResult
from harness.report.text import grouped, ratio_text, significant, unit
from harness.results.comparison import Spread, spreads
from harness.results.journal import Journal
from harness.results.schema import Calibration, Cell, PlannedCase, Run, Verdict
from harness.statistics.paired import Comparison
from shapes.case import text_of

FEW = 8  # the number of rows that a chart shows side by side without a choice
FAR = 5.0
"""Rows that take more than this many times as long as the fastest are not shown beside it by default."""


@dataclass(frozen=True)
class MeasuredCase(CaseResult):
    """A finished case with its run. `done` names the device where several devices measured the run."""

    folder: Path
    run: Run
    label: str  # names the run where a page has several runs of the op; else empty
    planned: PlannedCase
    calibrations: Sequence[Calibration]  # those of all devices of the run, where there are several
    spreads: Sequence[Spread]

    @property
    def size_order(self) -> tuple[list[int], ...]:
        """Sorts the cases of an op by their sizes; a range by its ends."""
        sizes = self.planned.sizes.values()
        return tuple([int(number) for number in re.findall(r"\d+", str(size))] for size in sizes)

    def named(self, text: str) -> str:
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


def in_unit(rows: Sequence[dict[str, Any]]) -> tuple[str, Columns]:
    """Gives rows their `time_us`, `low_us` and `high_us` as `time`, `time_low` and `time_high` too, in the
    unit of the smallest time. Returns the name of the unit, and the columns of the three."""
    size, name = unit(min((row["time_us"] for row in rows if row["time_us"]), default=1.0))
    keys = {"time": "time_us", "time_low": "low_us", "time_high": "high_us"}
    for row in rows:
        row |= {key: row[us] and round(row[us] / size, 6) for key, us in keys.items()}
    return name, dict(zip((f"time, {name}", "from", "to"), ((key, us_text) for key in keys), strict=True))


def shown_rows(cases: Sequence[MeasuredCase]) -> set[str]:
    """Names of the rows that charts show first: all, or the best of each provider and engines' defaults."""
    ratios: dict[str, list[float]] = {}
    defaults: dict[str, str] = {}
    for case in cases:
        for cell in case.timed:
            ratio = (cell.time_us or 1.0) / (case.timed[0].time_us or 1.0)
            ratios.setdefault(cell.name, []).append(math.log(ratio))
            if case.engines_of(cell):
                defaults[cell.name] = cell.impl
    if len(ratios) <= FEW:
        return {*ratios}
    # A row that some case lacks stands behind one that all have.
    means = {name: (-len(logs), sum(logs) / len(logs)) for name, logs in ratios.items()}
    alike = [*grouped(means, provider).values(), *grouped(defaults, defaults.__getitem__).values()]
    return {min(names, key=means.__getitem__) for names in alike}


def slow_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which rows with `name`, `shown` and `ratio` to the fastest are hidden for being slow; empty if none."""
    slow = {row["name"]: row["ratio"] for row in sorted(rows, key=lambda row: row["ratio"])}
    far = [f"{name} ({significant(ratio, 2)}x)" for name, ratio in slow.items() if ratio > FAR]
    return f"Not drawn, at more than {FAR:.0f}x the fastest: {', '.join(far)}." if far else ""


def not_shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sentences on the rows that a chart leaves out until a reader chooses them; empty if none."""
    if all(row["shown"] for row in rows):
        return ""
    many = len({row["name"] for row in rows}) > FEW
    few = "Of many rows the best of each provider and the engines' defaults are shown." * many
    return " " + " ".join(filter(None, [slow_rows(rows), few, "Choose others below the picture."]))


def verdict_text(verdict: Verdict | Comparison | None, is_baseline: bool = False) -> str:
    """The ratio with its interval; without a verdict `baseline` or an empty text."""
    if verdict:
        return ratio_text(verdict)
    return "baseline" if is_baseline else ""


def shared_sizes(cases: Sequence[MeasuredCase]) -> dict[str, int | str]:
    first = cases[0].planned.sizes
    return {k: v for k, v in first.items() if all(case.planned.sizes.get(k) == v for case in cases)}


def short_keys(cases: Sequence[MeasuredCase]) -> dict[str, str]:
    """Key -> short name of each case of an op: the sizes that not all of them have, and the boundary."""
    shared = shared_sizes(cases)
    keys = {}
    for case in cases:
        sizes = text_of({k: v for k, v in case.planned.sizes.items() if k not in shared})
        keys[case.planned.key] = " ".join(filter(None, [sizes, case.planned.boundary]))
    return keys
