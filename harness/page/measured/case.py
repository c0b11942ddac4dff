"""Measured case: the records of a case with the run that they are from, as its charts want them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.page.document import anchor
from harness.results.comparison import Spread, spreads
from harness.results.journal import Journal
from harness.results.schema import Calibration, CaseDone, Cell, PlannedCase, Run, Verdict
from shapes.case import text_of


@dataclass(frozen=True)
class MeasuredCase:
    """label:        of the run, where a page has several; empty otherwise
    done:         its device is named where several measured the run
    calibrations: of these; spreads: what they come to
    """

    folder: Path
    run: Run
    label: str
    planned: PlannedCase
    cells: Sequence[Cell]
    verdicts: Sequence[Verdict]
    done: CaseDone
    calibrations: Sequence[Calibration] = ()
    spreads: Sequence[Spread] = ()

    @property
    def timed(self) -> list[Cell]:
        """Fastest first."""
        return sorted((c for c in self.cells if c.time_us is not None), key=lambda c: (c.time_us, c.name))

    @property
    def limit_us(self) -> float | None:
        """What the machine would need at its measured ceilings, microseconds; None where it has none."""
        limits = [
            c.time_us * c.percent_of_ceiling / 100 for c in self.timed if c.time_us and c.percent_of_ceiling
        ]
        return statistics.median(limits) if limits else None

    @property
    def baselines(self) -> list[str]:
        """Entries that memory splits into groups have one each."""
        return [v.b for v in self.verdicts if v.about == "A/A"]

    def against_baseline(self, cell: Cell) -> Verdict | None:
        return next((v for v in self.verdicts if v.about == "baseline" and v.a == cell.name), None)

    def row_name(self, cell: Cell) -> str:
        return f"{cell.name} · {self.label}" if self.label else cell.name

    def row_anchor(self, cell: Cell) -> str:
        return anchor(self.label, cell.case, cell.name)


def measured_cases(folder: Path, label: str = "") -> list[MeasuredCase]:
    """The finished cases of a run folder, in the order of their measurement. Raises UsageError where it
    cannot be read."""
    journal = Journal(folder)
    run = journal.run()
    planned = {case.key: case for case in run.cases}
    several = len(journal.devices()) > 1
    calibrations = journal.calibrations() if several else []
    apart = spreads(calibrations)
    cases = []
    for key, records in journal.finished().items():
        done = next(r for r in records if isinstance(r, CaseDone))
        cells = [r for r in records if isinstance(r, Cell)]
        verdicts = [r for r in records if isinstance(r, Verdict)]
        if key in planned and cells:
            done = done if several else done.nameless
            cases.append(
                MeasuredCase(folder, run, label, planned[key], cells, verdicts, done, calibrations, apart)
            )
    return cases


def unit_of(times_us: Iterable[float]) -> tuple[float, str]:
    """Microseconds in the unit that the least of them is read in, and its name."""
    least = min(times_us, default=math.nan)
    return (1e6, "s") if least >= 1e6 else (1e3, "ms") if least >= 1e3 else (1.0, "us")


def interval_ends(value: float, low: float | None, high: float | None) -> tuple[float, float]:
    """The ends of an interval; the value itself where one is missing or infinite, or has no logarithm."""
    if low is None or high is None or low <= 0 or math.isinf(high):
        return value, value
    return low, high


def us_text(us: float | None) -> str:
    """Four digits, or all before the point."""
    if us is None:
        return ""
    return f"{us:.4g}" if us < 9999.5 else f"{us:.0f}"


def short_keys(cases: Sequence[MeasuredCase]) -> dict[str, str]:
    """Of cases of one op, by their keys: sizes that not all have, and the boundary."""
    first = cases[0].planned.sizes
    shared = {k for k, v in first.items() if all(case.planned.sizes.get(k) == v for case in cases)}
    return {
        case.planned.key: " ".join(
            filter(
                None,
                [
                    text_of({k: v for k, v in case.planned.sizes.items() if k not in shared}),
                    case.planned.boundary,
                ],
            )
        )
        for case in cases
    }
