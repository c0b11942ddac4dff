"""The table of two compared runs, as text or markdown: cell by cell, the floor, what regressed."""

from __future__ import annotations

from collections.abc import Iterable

from harness.report.text import microseconds, ratio, table
from harness.results.comparison import Compared, Row, means
from harness.results.recorded import RecordedRun

HEADERS = ["implementation", "A", "B", "B vs A", "verdict", "note"]


def comparison_table(a: RecordedRun, b: RecordedRun, comparison: Compared, style: str) -> str:
    """Text, or markdown where style is `github`."""
    lines = [f"A: {_origin(a)}", f"B: {_origin(b)}", *comparison.notes, ""]
    for case, rows in _by_case(comparison.rows).items():
        cells = table([_cells(row) for row in rows], HEADERS, style=style)
        lines += [f"{case}  ({rows[0].weight:.1%} of the suite)", "", cells, ""]
    lines += [f"floor between the sessions: {comparison.floor:.1%}, {comparison.floor_from}"]
    if comparison.missing:
        lines += ["in one run only:", *(f"- {text}" for text in comparison.missing)]
    if speedups := means(comparison.rows):
        lines += ["", "over all cases, weighted by their share of the serving step:"]
        lines += [f"- {name}: B is {speedup:.3f}x as fast as A" for name, speedup in speedups.items()]
    lines += ["", _conclusion(comparison)]
    return "\n".join(lines)


def _by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return cases


def _origin(recorded: RecordedRun) -> str:
    return f"{recorded.folder} ({recorded.run.created}, commit {recorded.commit})"


def _cells(row: Row) -> list[str]:
    speedup = ratio(row.comparison.ratio, row.comparison.low, row.comparison.high)
    notes = []
    if not row.anchor:
        notes.append("absolute times: the anchor itself, or no anchor that did not change")
    if row.changed:
        notes.append("changed")
    if row.drift:
        notes.append("machine drift: it did not change and its time did")
    verdict = row.comparison.verdict if row.anchor else ""
    return [row.name, microseconds(row.a_us), microseconds(row.b_us), speedup, verdict, ", ".join(notes)]


def _conclusion(comparison: Compared) -> str:
    if comparison.regressions:
        names = ", ".join(f"{row.name} at {row.case}" for row in comparison.regressions)
        return f"{len(comparison.regressions)} regressed: {names}"
    judged = [row for row in comparison.rows if row.anchor]
    if not judged:
        return "nothing can be judged: no implementation that did not change shares a case with another"
    unclear = sum(row.comparison.verdict == "unclear" for row in judged)
    return f"nothing regressed{f'; {unclear} of {len(judged)} unclear' if unclear else ''}"
