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
NOT_IN_B = "not in B"  # ends the sentence on a cell that B does not have, see RunComparison.missing
CLAIMS_NOTE = """
On their hardware these commands measure the claims; below each is what this machine can time of it:"""


def comparison_table(a: RecordedRun, b: RecordedRun, comparison: RunComparison) -> RenderableType:
    return Group(*_parts(a, b, comparison))


def comparison_markdown(a: RecordedRun, b: RecordedRun, comparison: RunComparison) -> str:
    parts = _parts(a, b, comparison)
    return "\n".join(part if isinstance(part, str) else part.markdown() for part in parts)


def _parts(a: RecordedRun, b: RecordedRun, comparison: RunComparison) -> Iterator[str | FittingTable]:
    """Yields the lines of the report, and a table for each case."""
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
        yield from (f"- {sentence}" for sentence in comparison.missing)
    if speedups := total_speedups(comparison.rows):
        weights = {row.case: row.weight for row in comparison.rows}
        yield f"\n{how_summed(weights.values())}:"
        yield from (f"- {name}: B is {speedup:.3f}x as fast as A" for name, speedup in speedups.items())
    yield "\n" + "; ".join(filter(None, [_regressed(comparison), _drift(comparison)]))


def since(a: RecordedRun, comparison: RunComparison) -> str:
    """What changed since run A, in a line."""
    judged, unclear_count = _judged(comparison)
    lost = Counter((name, status) for (_, name), status in comparison.lost.items())
    changes = list(_speed_changes(judged))
    for (name, status), cases in lost.items():
        changes.append(f"{name}: no time now ({status}) in {counted(cases)}")
    drift = _drift(comparison)
    clauses = [*changes, *filter(None, [drift])]
    if unclear_count < len(judged):
        unchanged = "nothing changed"
        if changes:
            unchanged = "no other row changed"
        elif drift:  # the clause before this one names the baseline
            unchanged = "relative to it nothing changed"
        clauses.append(f"{unchanged} beyond the noise between sessions ({100 * comparison.noise:.2g} %)")
    if unclear_count:
        clauses.append(f"{unclear_count} of {len(judged)} rows are unclear")
    when = a.run.created.replace("T", " ")[:16]  # to the minute
    return f"since {when} ({portable(str(a.folder))}): {'; '.join(clauses)}"


def _speed_changes(judged: Sequence[ComparedRow]) -> Iterator[str]:
    """Yields a clause for each row that became slower or faster, with the ratio of their total times."""
    for name, rows in grouped(judged, lambda row: row.name).items():
        for verdict in ("slower", "faster"):
            if changed := [row for row in rows if row.comparison.verdict == verdict]:
                speedup = total_speedups(changed)[name]
                ratio = 1 / speedup if verdict == "slower" else speedup
                yield f"{name} {ratio:.2f}x {verdict} in {len(changed)} of {counted(len(rows))}"


def _judged(comparison: RunComparison) -> tuple[list[ComparedRow], int]:
    """The rows that were compared with a baseline, for only these have verdicts; and how many are unclear."""
    judged = [row for row in comparison.rows if row.baseline]
    return judged, len([row for row in judged if row.comparison.verdict == "unclear"])


def _drift(comparison: RunComparison) -> str:
    """A clause on baselines, not known to have changed, that took another time in B; empty if none did."""
    # Only a baseline is compared by absolute times although it did not change.
    baselines = [row for row in comparison.rows if not (row.baseline or row.changed or row.spread)]
    moved = [row.comparison for row in baselines if not row.comparison.low <= 1 <= row.comparison.high]
    b_over_a = [1 / ratio.ratio for ratio in moved if abs(1 / ratio.ratio - 1) > MIN_SESSION_NOISE]
    longer = extent(b_over_a, 2)
    return f"the baseline itself took {longer}x as long (other clocks or load)" if longer else ""


def _cells(row: ComparedRow) -> list[str]:
    """The cells of a row, in the order of COLUMNS."""
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
    """What regressed, or that nothing did, or why that is not known."""
    names = [f"{row.name} at {row.case}" for row in comparison.regressions]
    names += [f"{name} at {case} ({status})" for (case, name), status in comparison.lost.items()]
    if names:
        return f"{len(names)} regressed: {', '.join(names)}"
    judged, unclear_count = _judged(comparison)
    if not judged:
        return "nothing can be judged: no implementation that did not change shares a case with another"
    if unclear_count == len(judged):
        return f"not known whether anything regressed: all {unclear_count} are unclear"
    absent = len([sentence for sentence in comparison.missing if sentence.endswith(NOT_IN_B)])
    some_unclear = f"{unclear_count} of {len(judged)} unclear" if unclear_count else ""
    some_absent = f"{absent} {NOT_IN_B}" if absent else ""
    return "; ".join(filter(None, ["nothing regressed", some_unclear, some_absent]))


def claims_table(claims: JsonObject, tests: Sequence[Test]) -> RenderableType:
    """The verdicts on claims, and the commands that measure them; `claims` is the file of claims."""
    rows = [
        {"claim": f"{test.op} {test.factor:g}x", "against": test.against, "verdict": test.verdict,
         f"largest on {claims['device']}": _largest_text(test.claimed)}
        for test in tests
    ]  # fmt: skip
    head = f"{claims['source']}\nunknown: {claims['unknown']}\n"
    return Group(head, table_of(rows), CLAIMS_NOTE, *_commands(tests, claims["kernels"]))


def _commands(tests: Sequence[Test], claimed_patterns: Sequence[str]) -> Iterator[RenderableType]:
    """Yields for each op the command that measures it, and which of its rows this machine can time."""
    for op, of_op in grouped(tests, lambda test: test.op).items():
        names = dict.fromkeys(name for test in of_op for name in test.runs)
        claimed = [name for name in names if matches(name, claimed_patterns)]
        rivals = [name for name in names if name not in claimed]
        yield whole_line(COMMAND + command("run", "--op", op, "--suite", "r1-tp8", "--budget", "5m"))
        measured = ", ".join(claimed) or "none of the claim"
        yield f"    here: {measured}, against {', '.join(rivals) or 'nothing'}"


def _largest_text(largest: Ratio | None) -> str:
    """`2.00x (1.90 to 2.10) aiter.asm over torch.sdpa, batch=64 ...`; empty without a ratio."""
    if largest is None:
        return ""
    sizes = largest.case.partition(" ")[2]
    ratio = ranged(largest.ratio, largest.low, largest.high, ".2f", "x")
    return f"{ratio} {largest.a} over {largest.b}, {sizes}"
