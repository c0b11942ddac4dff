"""Measured cases of a run, as the charts of a page need them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.page.document import anchor
from harness.report.rows import CaseResult
from harness.report.text import in_digits, ratio_text
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

    @property
    def place(self) -> str:
        """The place in the suite and the share of its weight."""
        place = self.planned.place
        return place if place == "ad hoc" else f"{place}, {100 * self.planned.weight:.1f} % of the suite"


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
        case = CaseResult.of(records)
        if key in planned and case.cells:
            cases.append(
                MeasuredCase(
                    cells=case.cells,
                    verdicts=case.verdicts,
                    done=case.done if several else case.done.nameless,
                    folder=folder,
                    run=run,
                    label=label,
                    planned=planned[key],
                    calibrations=calibrations,
                    spreads=apart,
                )
            )
    return cases


def interval_ends(value: float, low: float | None, high: float | None) -> tuple[float, float]:
    """The ends of an interval; the value itself where an end is missing or infinite, or has no logarithm."""
    if low is None or high is None or low <= 0 or math.isinf(high):
        return value, value
    return low, high


def ratio_mark(name: str, of: Verdict | Comparison | None) -> dict[str, Any]:
    """What a chart and its table show of a ratio; empty texts and None without one."""
    ratio = of.ratio if of else None
    low, high = interval_ends(ratio, of.low, of.high) if of and ratio is not None else (None, None)
    word = of.verdict if of else ""
    return {"name": name, "ratio": ratio, "low": low, "high": high, "text": verdict_text(of), "verdict": word}


def us_text(us: float | None) -> str:
    return in_digits(us, 4)


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
