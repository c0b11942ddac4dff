"""Tables of two compared runs, as text or markdown, and of headline claims compared with recorded runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from harness.files import JsonObject
from harness.paths import command, portable
from harness.report.fitting_table import Column, FittingTable, table_of
from harness.report.terminal import COMMAND, whole_line
from harness.report.text import counted, extent, grouped, microseconds, ranged, ratio_text, together
from harness.results.claims import Ratio, Test, matches
from harness.results.comparison import MIN_FLOOR, Compared, Row, totals
from harness.results.read import RecordedRun

COLUMNS = [Column("implementation"), Column("A", right=True), Column("B", right=True), Column("B vs A"),
           Column("verdict"), Column("note", wraps=True, spare=1)]  # fmt: skip
CLAIMS_NOTE = """
On their hardware these commands measure the claims; below each is what this machine can time of it:"""


def comparison_table(a: RecordedRun, b: RecordedRun, comparison: Compared) -> RenderableType:
    return Group(*_parts(a, b, comparison))


def comparison_markdown(a: RecordedRun, b: RecordedRun, comparison: Compared) -> str:
    parts = _parts(a, b, comparison)
    return "\n".join(part if isinstance(part, str) else part.markdown() for part in parts)


def _parts(a: RecordedRun, b: RecordedRun, comparison: Compared) -> Iterator[str | FittingTable]:
    """The lines of the report, and a table for each case."""
    for name, run in (("A", a), ("B", b)):
        yield f"{name}: {run.folder} ({run.run.created}, commit {run.commit})"
    yield from (f"NOT COMPARABLE, {reason}" for reason in comparison.incompatible)
    yield from (*comparison.notes, "")
    for case, rows in grouped(comparison.rows, lambda row: row.case).items():
        yield from (f"{case}  ({100 * rows[0].weight:.1f} % of the suite)", "")
        yield from (FittingTable(COLUMNS, [_cells(row) for row in rows]), "")
    yield f"noise between the sessions: {comparison.noise:.1%}, {comparison.noise_from}"
    if comparison.missing:
        yield from ("in one run only:", *(f"- {text}" for text in comparison.missing))
    if speedups := totals(comparison.rows):
        yield from ("", f"{together({row.case: row.weight for row in comparison.rows}.values())}:")
        yield from (f"- {name}: B is {speedup:.3f}x as fast as A" for name, speedup in speedups.items())
    yield from ("", "; ".join([_regressed(comparison), *_drift(comparison)]))


def since(a: RecordedRun, comparison: Compared) -> str:
    """What changed since run A, in a line."""
    judged = [row for row in comparison.rows if row.baseline]
    words = Counter(row.comparison.verdict for row in judged)
    said = []
    for name, rows in grouped(judged, lambda row: row.name).items():
        for word, sign in (("slower", -1), ("faster", 1)):
            if moved := [row for row in rows if row.comparison.verdict == word]:
                ratio = totals(moved)[name] ** sign
                said.append(f"{name} {ratio:.2f}x {word} in {len(moved)} of {counted(len(rows))}")
    lost = Counter((name, word) for (_, name), word in comparison.lost.items())
    said += [f"{name}: no time now ({word}) in {counted(cases)}" for (name, word), cases in lost.items()]
    drift = _drift(comparison)
    what = (
        "no other row changed" if said else "relative to it nothing changed" if drift else "nothing changed"
    )
    what += f" beyond the noise between sessions ({100 * comparison.noise:.2g} %)"
    unclear = f"{words['unclear']} of {len(judged)} rows are unclear" if words["unclear"] else ""
    told = [*said, *drift, what if words["unclear"] < len(judged) else "", unclear]
    when = a.run.created.replace("T", " ")[:16]
    return f"since {when} ({portable(str(a.folder))}): {'; '.join(filter(None, told))}"


def _drift(comparison: Compared) -> list[str]:
    """What is to be said where baselines, which are not known to have changed, took another time in B."""
    rows = [row for row in comparison.rows if not (row.baseline or row.changed or row.spread)]
    took = [1 / row.comparison.ratio for row in rows if not row.comparison.low <= 1 <= row.comparison.high]
    far = [ratio for ratio in took if abs(ratio - 1) > MIN_FLOOR]
    return [f"the baseline itself took {extent(far, 2)}x as long (other clocks or load)"] if far else []


def _cells(row: Row) -> list[str]:
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


def _regressed(comparison: Compared) -> str:
    names = [f"{row.name} at {row.case}" for row in comparison.regressions]
    names += [f"{name} at {case} ({word})" for (case, name), word in comparison.lost.items()]
    if names:
        return f"{len(names)} regressed: {', '.join(names)}"
    judged = [row for row in comparison.rows if row.baseline]
    if not judged:
        return "nothing can be judged: no implementation that did not change shares a case with another"
    unclear = sum(row.comparison.verdict == "unclear" for row in judged)
    if unclear == len(judged):
        return f"not known whether anything regressed: all {unclear} are unclear"
    absent = sum(text.endswith("not in B") for text in comparison.missing)
    left = [f"{unclear} of {len(judged)} unclear" if unclear else "", f"{absent} not in B" if absent else ""]
    return "; ".join(filter(None, ["nothing regressed", *left]))


def claims_table(claims: JsonObject, tests: Sequence[Test]) -> RenderableType:
    rows = [
        {"claim": f"{t.op} {t.factor:g}x", "against": t.against, "verdict": t.verdict,
         f"largest on {claims['device']}": _ratio(t.claimed)}
        for t in tests
    ]  # fmt: skip
    head = f"{claims['source']}\nunknown: {claims['unknown']}\n"
    return Group(head, table_of(rows), CLAIMS_NOTE, *_commands(tests, claims["kernels"]))


def _commands(tests: Sequence[Test], kernels: Sequence[str]) -> Iterator[RenderableType]:
    """For each op the command that measures it, and which of the rows this machine can time."""
    for op in dict.fromkeys(t.op for t in tests):
        names = dict.fromkeys(name for t in tests if t.op == op for name in t.runs)
        ours = [name for name in names if matches(name, kernels)]
        rivals = [name for name in names if name not in ours]
        yield whole_line(COMMAND + command("run", "--op", op, "--suite", "r1-tp8", "--budget", "5m"))
        yield f"    here: {', '.join(ours) or 'none of the claim'}, against {', '.join(rivals) or 'nothing'}"


def _ratio(largest: Ratio | None) -> str:
    """With an interval that is wide enough for the largest of so many."""
    if largest is None:
        return ""
    sizes = largest.case.partition(" ")[2]
    ratio = ranged(largest.ratio, largest.low, largest.high, ".2f", "x")
    return f"{ratio} {largest.a} over {largest.b}, {sizes}"
