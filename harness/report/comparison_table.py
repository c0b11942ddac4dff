"""Tables of two compared runs, as text or markdown, and of headline claims compared with recorded runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from harness.files import JsonObject
from harness.paths import command, portable
from harness.report.fitting_table import Column, FittingTable, table_of
from harness.report.terminal import COMMAND, whole_line
from harness.report.text import counted, extent, grouped, how_summed, microseconds, ranged, ratio_text
from harness.results.claims import Ratio, Test, matches
from harness.results.comparison import MIN_SESSION_NOISE, ComparedRow, RunComparison, total_speedups
from harness.results.read import RecordedRun

COLUMNS = [Column("implementation"), Column("A", right=True), Column("B", right=True), Column("B vs A"),
           Column("verdict"), Column("note", wraps=True, spare=1)]  # fmt: skip
CLAIMS_NOTE = """
On their hardware these commands measure the claims; below each is what this machine can time of it:"""


def comparison_table(a: RecordedRun, b: RecordedRun, comparison: RunComparison) -> RenderableType:
    return Group(*_parts(a, b, comparison))


def comparison_markdown(a: RecordedRun, b: RecordedRun, comparison: RunComparison) -> str:
    parts = _parts(a, b, comparison)
    return "\n".join(part if isinstance(part, str) else part.markdown() for part in parts)


def _parts(a: RecordedRun, b: RecordedRun, comparison: RunComparison) -> Iterator[str | FittingTable]:
    """The lines of the report, and a table for each case."""
    for name, run in (("A", a), ("B", b)):
        yield f"{name}: {run.folder} ({run.run.created}, commit {run.commit})"
    yield from (f"NOT COMPARABLE, {reason}" for reason in comparison.incompatible)
    yield from [*comparison.notes, ""]
    for case, rows in grouped(comparison.rows, lambda row: row.case).items():
        yield f"{case}  ({100 * rows[0].weight:.1f} % of the suite)\n"
        yield FittingTable(COLUMNS, [_cells(row) for row in rows])
        yield ""
    yield f"noise between the sessions: {comparison.noise:.1%}, {comparison.noise_from}"
    if comparison.missing:
        yield "in one run only:"
        yield from (f"- {text}" for text in comparison.missing)
    if speedups := total_speedups(comparison.rows):
        weights = {row.case: row.weight for row in comparison.rows}
        yield f"\n{how_summed(weights.values())}:"
        yield from (f"- {name}: B is {speedup:.3f}x as fast as A" for name, speedup in speedups.items())
    yield "\n" + "; ".join([_regressed(comparison), *_drift(comparison)])


def since(a: RecordedRun, comparison: RunComparison) -> str:
    """What changed since run A, in a line."""
    judged = [row for row in comparison.rows if row.baseline]
    unclear = _count_unclear(judged)
    moved = [*_moved(judged)]
    lost = Counter((name, status) for (_, name), status in comparison.lost.items())
    moved += [f"{name}: no time now ({status}) in {counted(cases)}" for (name, status), cases in lost.items()]
    drift = _drift(comparison)
    sentences = moved + drift
    if unclear < len(judged):
        rest = "relative to it nothing changed" if drift else "nothing changed"
        if moved:
            rest = "no other row changed"
        sentences.append(f"{rest} beyond the noise between sessions ({100 * comparison.noise:.2g} %)")
    if unclear:
        sentences.append(f"{unclear} of {len(judged)} rows are unclear")
    when = a.run.created.replace("T", " ")[:16]  # to the minute
    return f"since {when} ({portable(str(a.folder))}): {'; '.join(sentences)}"


def _moved(judged: Sequence[ComparedRow]) -> Iterator[str]:
    """The rows that became slower or faster, each with the ratio of its total times over those cases."""
    for name, rows in grouped(judged, lambda row: row.name).items():
        for verdict in ("slower", "faster"):
            if moved := [row for row in rows if row.comparison.verdict == verdict]:
                ratio = total_speedups(moved)[name] ** (1 if verdict == "faster" else -1)
                yield f"{name} {ratio:.2f}x {verdict} in {len(moved)} of {counted(len(rows))}"


def _count_unclear(judged: Sequence[ComparedRow]) -> int:
    return sum(row.comparison.verdict == "unclear" for row in judged)


def _drift(comparison: RunComparison) -> list[str]:
    """A sentence where baselines, which are not known to have changed, took another time in B; else none."""
    baselines = [row for row in comparison.rows if not (row.baseline or row.changed or row.spread)]
    others = [row.comparison for row in baselines if not row.comparison.low <= 1 <= row.comparison.high]
    took = [1 / ratio.ratio for ratio in others if abs(1 / ratio.ratio - 1) > MIN_SESSION_NOISE]
    return [f"the baseline itself took {extent(took, 2)}x as long (other clocks or load)"] if took else []


def _cells(row: ComparedRow) -> list[str]:
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
    times = [microseconds(row.a_us), microseconds(row.b_us)]
    return [row.name, *times, ratio_text(row.comparison), verdict, ", ".join(notes)]


def _regressed(comparison: RunComparison) -> str:
    names = [f"{row.name} at {row.case}" for row in comparison.regressions]
    names += [f"{name} at {case} ({status})" for (case, name), status in comparison.lost.items()]
    if names:
        return f"{len(names)} regressed: {', '.join(names)}"
    judged = [row for row in comparison.rows if row.baseline]
    if not judged:
        return "nothing can be judged: no implementation that did not change shares a case with another"
    unclear = _count_unclear(judged)
    if unclear == len(judged):
        return f"not known whether anything regressed: all {unclear} are unclear"
    text = "nothing regressed"
    if unclear:
        text += f"; {unclear} of {len(judged)} unclear"
    if absent := sum(text.endswith("not in B") for text in comparison.missing):
        text += f"; {absent} not in B"
    return text


def claims_table(claims: JsonObject, tests: Sequence[Test]) -> RenderableType:
    rows = [
        {"claim": f"{test.op} {test.factor:g}x", "against": test.against, "verdict": test.verdict,
         f"largest on {claims['device']}": _largest_text(test.claimed)}
        for test in tests
    ]  # fmt: skip
    head = f"{claims['source']}\nunknown: {claims['unknown']}\n"
    return Group(head, table_of(rows), CLAIMS_NOTE, *_commands(tests, claims["kernels"]))


def _commands(tests: Sequence[Test], kernels: Sequence[str]) -> Iterator[RenderableType]:
    """For each op the command that measures it, and which of the rows this machine can time."""
    for op, of_op in grouped(tests, lambda test: test.op).items():
        names = dict.fromkeys(name for test in of_op for name in test.runs)
        claimed = [name for name in names if matches(name, kernels)]
        rivals = [name for name in names if name not in claimed]
        yield whole_line(COMMAND + command("run", "--op", op, "--suite", "r1-tp8", "--budget", "5m"))
        measured = ", ".join(claimed) or "none of the claim"
        yield f"    here: {measured}, against {', '.join(rivals) or 'nothing'}"


def _largest_text(largest: Ratio | None) -> str:
    """With an interval that is wide enough for the largest of so many."""
    if largest is None:
        return ""
    sizes = largest.case.partition(" ")[2]
    ratio = ranged(largest.ratio, largest.low, largest.high, ".2f", "x")
    return f"{ratio} {largest.a} over {largest.b}, {sizes}"
