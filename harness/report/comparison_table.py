"""The table of two compared runs."""

from __future__ import annotations

from collections.abc import Iterable

from tabulate import tabulate

from harness.report.text import micro
from harness.results.comparison import Compared, Row, means
from harness.results.recorded import RecordedRun

HEADERS = ["implementation", "A", "B", "B vs A", "verdict", "note"]


def comparison_table(a: RecordedRun, b: RecordedRun, found: Compared, style: str) -> str:
    """Text, or markdown where style is `github`."""
    lines = [f"A: {_told(a)}", f"B: {_told(b)}", *found.notes, ""]
    for case, rows in _by_case(found.rows).items():
        table = tabulate([_cells(row) for row in rows], HEADERS, style, disable_numparse=True)
        lines += [f"{case}  ({rows[0].weight:.1%} of the suite)", "", table, ""]
    lines += [f"floor between the sessions: {found.floor:.1%}, {found.floor_from}"]
    if found.missing:
        lines += ["in one run only:", *(f"- {text}" for text in found.missing)]
    if ratios := means(found.rows):
        lines += ["", "over all cases, weighted by their share of the serving step:"]
        lines += [f"- {name}: B is {ratio:.3f}x as fast as A" for name, ratio in ratios.items()]
    lines += ["", _verdict(found)]
    return "\n".join(lines)


def _by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case, []).append(row)
    return found


def _told(stored: RecordedRun) -> str:
    return f"{stored.folder} ({stored.run.created}, commit {stored.commit})"


def _cells(row: Row) -> list[str]:
    speedup = f"{row.comparison.ratio:.3f}x ({row.comparison.low:.3f}..{row.comparison.high:.3f})"
    notes = []
    if not row.anchor:
        notes.append("absolute times: the anchor itself, or no anchor that did not change")
    if row.changed:
        notes.append("changed")
    if row.drift:
        notes.append("machine drift: it did not change and its time did")
    verdict = row.comparison.verdict if row.anchor else ""
    return [row.name, micro(row.a_us), micro(row.b_us), speedup, verdict, ", ".join(notes)]


def _verdict(found: Compared) -> str:
    if found.regressions:
        names = ", ".join(f"{row.name} at {row.case}" for row in found.regressions)
        return f"{len(found.regressions)} regressed: {names}"
    judged = [row for row in found.rows if row.anchor]
    if not judged:
        return "nothing can be judged: no implementation that did not change shares a case with another"
    unclear = sum(row.comparison.verdict == "unclear" for row in judged)
    return f"nothing regressed{f'; {unclear} of {len(judged)} unclear' if unclear else ''}"
