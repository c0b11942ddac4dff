"""Section of an op: who is fastest where, how that goes with sizes, the roofline, and each case by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.page.document import Chart, PageSection, anchor
from harness.page.measured.case import MeasuredCase
from harness.page.measured.ranking import ranking
from harness.page.measured.roofline import roofline
from harness.page.measured.rounds import rounds
from harness.page.measured.settings import setting_charts, settings_over_cases
from harness.page.measured.sizes import sweep_charts, sweeps, winners
from harness.report.case_notes import conclusions, measuring, remarks, untimed
from harness.report.case_table import headline
from harness.report.reproduce import reproductions
from harness.report.setting_table import conclusion_lines

MOST_CASES = 40
"""That have charts of their own: more would make a page slow to open."""
MOST_ROUNDS = 4000
"""That a chart draws one by one."""


def op_section(op: str, cases: Sequence[MeasuredCase]) -> PageSection:
    """Of the cases of one op, of all runs of a page."""
    ranked = [case for case in cases if case.run.contrast == "implementations"]
    charts: list[Chart | None] = [winners(ranked)] if ranked else []
    for sweep in sweeps(ranked):
        charts += sweep_charts(sweep)
    for label in dict.fromkeys(case.label for case in ranked):
        charts.append(roofline([case for case in ranked if case.label == label]))
    charts += [settings_over_cases(run) for run in _by_run(c for c in cases if c.run.contrast == "settings")]
    by_key: dict[tuple[str, str], list[MeasuredCase]] = {}
    for case in sorted(cases, key=lambda case: -case.planned.weight):
        by_key.setdefault((case.run.contrast, case.planned.key), []).append(case)
    shown = list(by_key.values())[:MOST_CASES]
    left = len(by_key) - len(shown)
    return PageSection(
        anchor(op),
        op,
        " ".join(_headlines(cases)),
        [chart for chart in charts if chart],
        [("not shown", f"{left} cases of less weight have no charts of their own")] if left else [],
        [_case_section(same) for same in shown],
    )


def _headlines(cases: Sequence[MeasuredCase]) -> Iterable[str]:
    """Of the case of most weight; of flags, what to take."""
    ranked = [case for case in cases if case.run.contrast == "implementations"]
    if ranked:
        first = max(ranked, key=lambda case: case.planned.weight)
        yield f"{first.planned.key}: {_headline([c for c in ranked if c.planned.key == first.planned.key])}."
    for run_cases in _by_run(case for case in cases if case.run.contrast == "settings"):
        title, lines = conclusion_lines(
            [r for c in run_cases for r in (*c.cells, *c.verdicts)], run_cases[0].run
        )
        name = run_cases[0].label
        yield f"{name + ': ' if name else ''}{title} {'. '.join(lines)}.".replace(" .", ".")


def _by_run(cases: Iterable[MeasuredCase]) -> list[list[MeasuredCase]]:
    runs: dict[str, list[MeasuredCase]] = {}
    for case in cases:
        runs.setdefault(str(case.folder), []).append(case)
    return list(runs.values())


def _headline(same: Sequence[MeasuredCase]) -> str:
    heads = []
    for case in same:
        label = f"{case.label}: " if case.label else ""
        heads.append(label + headline(case.timed, case.verdicts, case.cells).plain)
    return "; ".join(heads)


def _case_section(same: Sequence[MeasuredCase]) -> PageSection:
    """A case of one run, or of several."""
    first = same[0]
    charts: list[Chart | None] = []
    if first.run.contrast == "settings":
        for case in same:
            charts += setting_charts(case)
    else:
        charts.append(ranking(same))
    charts += [rounds(case, MOST_ROUNDS) for case in same]
    place = f"{first.planned.place}, {100 * first.planned.weight:.1f} % of the suite"
    return PageSection(
        anchor("case", first.run.contrast, first.planned.key),
        first.planned.key,
        _headline(same) if first.run.contrast == "implementations" else "",
        [chart for chart in charts if chart],
        [
            ("place", place if first.planned.place != "ad hoc" else "ad hoc"),
            *(note for case in same for note in _notes(case)),
        ],
    )


def _notes(case: MeasuredCase) -> Iterable[tuple[str, str]]:
    notes = [
        *untimed(case.cells),
        *reproductions(case.cells, case.run),
        *remarks(case.timed),
        *conclusions(case.cells, case.verdicts, case.done),
        *measuring(case.done, case.verdicts),
    ]
    for label, text in notes:
        yield f"{label} · {case.label}" if case.label else label, text
