"""The section of an op: which row is fastest in which case, how times depend on sizes, the roofline, and each
case by itself."""

from __future__ import annotations

from collections.abc import Sequence

from harness.page.case import MeasuredCase
from harness.page.document import Chart, PageSection, anchor
from harness.page.ranking import ranking, roofline, rounds
from harness.page.settings import setting_charts, settings_over_cases
from harness.page.sizes import sweep_charts, sweeps, winners
from harness.report.case_table import headline
from harness.report.notes import case_notes
from harness.report.rows import grouped
from harness.report.setting_table import conclusion_lines

MOST_CASES = 40
"""The number of cases with charts of their own: more would make a page slow to open."""
MOST_ROUNDS = 4000
"""The number of rounds that a chart draws one by one."""


def op_section(op: str, cases: Sequence[MeasuredCase]) -> PageSection:
    """The section for the cases of one op in all runs of a page."""
    ranked = [case for case in cases if case.run.contrast == "implementations"]
    toggled = [case for case in cases if case.run.contrast == "settings"]
    under_settings = grouped(toggled, lambda case: case.folder).values()
    charts: list[Chart | None] = [winners(ranked)] if ranked else []
    for sweep in sweeps(ranked):
        charts += sweep_charts(sweep)
    charts += [roofline(of_run) for of_run in grouped(ranked, lambda case: case.label).values()]
    charts += [settings_over_cases(of_run) for of_run in under_settings]
    heaviest_first = sorted(cases, key=lambda case: -case.planned.weight)
    by_key = list(grouped(heaviest_first, lambda case: (case.run.contrast, case.planned.key)).values())
    left = len(by_key) - MOST_CASES
    headlines = []
    if ranked:
        key = max(ranked, key=lambda case: case.planned.weight).planned.key
        headlines.append(f"{key}: {_headline([case for case in ranked if case.planned.key == key])}.")
    for of_run in under_settings:
        records = [record for case in of_run for record in (*case.cells, *case.verdicts)]
        title, lines = conclusion_lines(records, of_run[0].run)
        name = f"{of_run[0].label}: " if of_run[0].label else ""
        headlines.append(f"{name}{title} {'. '.join(lines)}.".replace(" .", "."))
    return PageSection(
        anchor(op),
        op,
        " ".join(headlines),
        [chart for chart in charts if chart],
        [("not shown", f"{left} cases of less weight have no charts of their own")] if left > 0 else [],
        [_case_section(same) for same in by_key[:MOST_CASES]],
    )


def _headline(same: Sequence[MeasuredCase]) -> str:
    """The fastest row of a case in each run."""
    return "; ".join(
        f"{case.label}: {headline(case)}" if case.label else str(headline(case)) for case in same
    )


def _case_section(same: Sequence[MeasuredCase]) -> PageSection:
    """The section for a case of one run, or of several."""
    first = same[0]
    charts: list[Chart | None] = []
    if first.run.contrast == "settings":
        for case in same:
            charts += setting_charts(case)
    else:
        charts.append(ranking(same))
    charts += [rounds(case, MOST_ROUNDS) for case in same]
    notes = [("place", first.place)]
    for case in same:
        for label, text in case_notes(case, case.run):
            notes.append((f"{label} · {case.label}" if case.label else label, text))
    return PageSection(
        anchor("case", first.run.contrast, first.planned.key),
        first.planned.key,
        _headline(same) if first.run.contrast == "implementations" else "",
        [chart for chart in charts if chart],
        notes,
    )
