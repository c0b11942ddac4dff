"""The table of two compared runs, as text or markdown: cell by cell, the noise, what regressed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from harness.report.text import microseconds, table, uncertain_ratio
from harness.results.comparison import Compared, Row, means
from harness.results.recorded import RecordedRun

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADERS = ["implementation", "A", "B", "B vs A", "verdict", "note"]


def comparison_table(a: RecordedRun, b: RecordedRun, comparison: Compared) -> RenderableType:
    from rich.console import Group

    from harness.report.fitting_table import Column, FittingTable

    columns = [
        Column(header, right=header in "AB", wraps=header == "note", spare=header == "note")
        for header in HEADERS
    ]
    parts: list[RenderableType] = [*_head(a, b, comparison), ""]
    for case, rows in _by_case(comparison.rows).items():
        parts += [_title(case, rows), "", FittingTable(columns, [_cells(row) for row in rows]), ""]
    return Group(*parts, *_foot(comparison))


def comparison_markdown(a: RecordedRun, b: RecordedRun, comparison: Compared) -> str:
    lines = [*_head(a, b, comparison), ""]
    for case, rows in _by_case(comparison.rows).items():
        lines += [_title(case, rows), "", table([_cells(row) for row in rows], HEADERS, style="github"), ""]
    return "\n".join([*lines, *_foot(comparison)])


def _head(a: RecordedRun, b: RecordedRun, comparison: Compared) -> list[str]:
    return [f"A: {_origin(a)}", f"B: {_origin(b)}", *comparison.notes]


def _title(case: str, rows: Sequence[Row]) -> str:
    return f"{case}  ({100 * rows[0].weight:.1f} % of the suite)"


def _foot(comparison: Compared) -> list[str]:
    lines = [f"noise between the sessions: {comparison.noise:.1%}, {comparison.noise_from}"]
    if comparison.missing:
        lines += ["in one run only:", *(f"- {text}" for text in comparison.missing)]
    if speedups := means(comparison.rows):
        lines += ["", "over all cases, weighted by their share of the serving step:"]
        lines += [f"- {name}: B is {speedup:.3f}x as fast as A" for name, speedup in speedups.items()]
    return [*lines, "", _conclusion(comparison)]


def _by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return cases


def _origin(recorded: RecordedRun) -> str:
    return f"{recorded.folder} ({recorded.run.created}, commit {recorded.commit})"


def _cells(row: Row) -> list[str]:
    speedup = " ".join(uncertain_ratio(row.comparison.ratio, row.comparison.low, row.comparison.high))
    notes = []
    if not row.baseline:
        notes.append("absolute times: the baseline itself, or no baseline that did not change")
    if row.changed:
        notes.append("changed")
    if row.drift and not row.spread:
        notes.append("machine drift: it did not change and its time did")
    if row.spread:
        notes.append(f"another device: noise {row.spread:.1%} higher")
    verdict = row.comparison.verdict if row.baseline else ""
    return [row.name, microseconds(row.a_us), microseconds(row.b_us), speedup, verdict, ", ".join(notes)]


def _conclusion(comparison: Compared) -> str:
    if comparison.regressions:
        names = ", ".join(f"{row.name} at {row.case}" for row in comparison.regressions)
        return f"{len(comparison.regressions)} regressed: {names}"
    judged = [row for row in comparison.rows if row.baseline]
    if not judged:
        return "nothing can be judged: no implementation that did not change shares a case with another"
    unclear = sum(row.comparison.verdict == "unclear" for row in judged)
    return f"nothing regressed{f'; {unclear} of {len(judged)} unclear' if unclear else ''}"
