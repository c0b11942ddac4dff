"""The section of an op: which row is fastest in which case, how times depend on sizes, the roofline, and each
case by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.page.case import MeasuredCase
from harness.page.document import Chart, PageSection, anchor
from harness.page.ranking import ranking, roofline, rounds
from harness.page.settings import setting_charts, settings_over_cases
from harness.page.sizes import sweep_charts, sweeps, winners
from harness.report.case_table import headline
from harness.report.notes import case_notes
from harness.report.setting_table import conclusion_lines

MOST_CASES = 40
"""The number of cases with charts of their own: more would make a page slow to open."""
MOST_ROUNDS = 4000
"""The number of rounds that a chart draws one by one."""


def op_section(op: str, cases: Sequence[MeasuredCase]) -> PageSection:
    """The section for the cases of one op in all runs of a page."""
    ranked = [case for case in cases if case.run.contrast == "implementations"]
    under_settings = _by_run(case for case in cases if case.run.contrast == "settings")
    charts: list[Chart | None] = [winners(ranked)] if ranked else []
    for sweep in sweeps(ranked):
        charts += sweep_charts(sweep)
    for label in dict.fromkeys(case.label for case in ranked):
        charts.append(roofline([case for case in ranked if case.label == label]))
    charts += [settings_over_cases(run_cases) for run_cases in under_settings]
    by_key: dict[tuple[str, str], list[MeasuredCase]] = {}
    for case in sorted(cases, key=lambda case: -case.planned.weight):
        by_key.setdefault((case.run.contrast, case.planned.key), []).append(case)
    shown = list(by_key.values())[:MOST_CASES]
    left = len(by_key) - len(shown)
    headlines = []
    if ranked:
        key = max(ranked, key=lambda case: case.planned.weight).planned.key
        headlines.append(f"{key}: {_headline([case for case in ranked if case.planned.key == key])}.")
    for run_cases in under_settings:
        records = [record for case in run_cases for record in (*case.cells, *case.verdicts)]
        title, lines = conclusion_lines(records, run_cases[0].run)
        name = f"{run_cases[0].label}: " if run_cases[0].label else ""
        headlines.append(f"{name}{title} {'. '.join(lines)}.".replace(" .", "."))
    return PageSection(
        anchor(op),
        op,
        " ".join(headlines),
        [chart for chart in charts if chart],
        [("not shown", f"{left} cases of less weight have no charts of their own")] if left else [],
        [_case_section(same) for same in shown],
    )


def _by_run(cases: Iterable[MeasuredCase]) -> list[list[MeasuredCase]]:
    runs: dict[str, list[MeasuredCase]] = {}
    for case in cases:
        runs.setdefault(str(case.folder), []).append(case)
    return list(runs.values())


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
