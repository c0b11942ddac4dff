"""Section of a ledger: what was predicted of each change, what was observed, and who was right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.page.document import Chart, PageSection, Table, TableRow, anchor
from harness.page.serving.colours import NOT_OBSERVED, NOT_PREDICTED, VERDICT_COLOURS
from harness.page.serving.ledger_charts import forest, forest_marks, off
from harness.page.serving.ledger_lines import NO_METHOD, LedgerLine, ledger_lines, row_names
from harness.page.serving.marks import cell
from harness.serving.ledger.ledger import LedgerRow
from harness.serving.ledger.residuals import TOLERANCE

READING = (
    "Of each method the upper mark is the predicted change, the lower one the observed, both with their 90 % "
    "intervals, where they have one. They explain each other where the intervals meet; the verdict stands to "
    "the right. A change left of the dashed line is a decrease."
)
OFF_READING = (
    "A mark for each prediction of a resolved change, by method and quantity: right of the dashed line more "
    f"changed than was predicted. In the grey band it is off by at most {TOLERANCE:.0%}. The colour is the "
    "verdict: whether the intervals meet, however wide they are."
)


def ledger_section(rows: Sequence[LedgerRow], title: str) -> PageSection:
    """Of any rows: of a ledger, an experiment, a publication."""
    lines = ledger_lines(rows)
    keys = dict.fromkeys((line.quantity, line.unit) for line in lines)
    charts = [
        _forest([line for line in lines if (line.quantity, line.unit) == (quantity, unit)], title)
        for quantity, unit in keys
    ]
    if far := [line for line in lines if line.relative is not None and line.verdict != "not resolved"]:
        charts.append(_off(far, len([line for line in lines if line.verdict == "not resolved"]), title))
    return PageSection(
        anchor=anchor("ledger", title),
        title=title,
        headline=headline(lines),
        charts=charts,
        notes=[*_explanations(rows), *_empty(rows, lines)],
    )


def headline(lines: Sequence[LedgerLine]) -> str:
    """How many of each verdict, by method."""
    by_method: dict[str, Counter[str]] = {}
    for line in lines:
        if line.method != NO_METHOD:
            by_method.setdefault(line.method, Counter())[line.verdict] += 1
    parts = []
    for method, counts in by_method.items():
        verdicts = [f"{counts[verdict]} {verdict}" for verdict in VERDICT_COLOURS if counts[verdict]]
        parts.append(f"{method}: {', '.join(verdicts)}")
    if unpredicted := sum(line.verdict == NOT_PREDICTED for line in lines):
        parts.append(f"{unpredicted} observed without a prediction")
    return "; ".join(parts) + "." if parts else "Nothing was predicted or observed."


def _forest(lines: Sequence[LedgerLine], title: str) -> Chart:
    quantity, unit = lines[0].quantity, lines[0].unit
    missing = list(dict.fromkeys(line.row for line in lines if line.verdict == NOT_OBSERVED))
    waiting = f" Not observed yet: {', '.join(missing)}." if missing else ""
    return Chart(
        anchor=anchor("ledger", title, quantity, unit),
        title=f"{quantity}, {unit}: predicted and observed change",
        reading=READING + waiting,
        picture=forest(lines, quantity, unit),
        table=_table(lines),
        marks=forest_marks(lines),
    )


def _off(lines: Sequence[LedgerLine], unresolved: int, title: str) -> Chart:
    left_out = (
        f" {unresolved} of changes that are not resolved are in the tables alone." if unresolved else ""
    )
    return Chart(
        anchor=anchor("ledger", title, "how far off"),
        title="How far off",
        reading=OFF_READING + left_out,
        picture=off(lines),
        table=_off_table(lines),
        marks=len(lines),
    )


def _off_table(lines: Sequence[LedgerLine]) -> Table:
    rows = [
        TableRow(
            [
                line.row,
                line.line,
                line.quantity,
                cell(line.relative, "+.1%"),
                f"{line.residual:+.4g} {line.unit}" if line.residual is not None else "",
                line.verdict,
            ]
        )
        for line in lines
    ]
    columns = ["row", "method", "quantity", "relative", "residual", "verdict"]
    return Table(columns, rows, frozenset({"relative"}))


def _table(lines: Sequence[LedgerLine]) -> Table:
    unit = lines[0].unit
    numeric = [f"{name}, {unit}" for name in ("predicted", "low", "high", "before", "observed",
               "observed low", "observed high", "residual")]  # fmt: skip
    columns = ["row", "method", *numeric, "relative", "verdict", "blind"]
    cells = []
    for line in lines:
        seen = line.observation
        observed = (None,) * 4 if seen is None else (seen.before, seen.change, seen.low, seen.high)
        before, change, low, high = observed
        cells.append(
            TableRow(
                [
                    line.row,
                    line.line,
                    *(cell(value, "+.5g") for value in (line.predicted, line.low, line.high)),
                    cell(before),
                    *(cell(value, "+.5g") for value in (change, low, high, line.residual)),
                    cell(line.relative, "+.1%"),
                    line.verdict,
                    "" if line.blind is None else "yes" if line.blind else "no",
                ]
            )
        )
    return Table(columns, cells, frozenset([*numeric, "relative"]))


def _explanations(rows: Sequence[LedgerRow]) -> list[tuple[str, str]]:
    """Each text once, with the rows that it is about and what shows it."""
    about: dict[str, list[str]] = {}
    for row, name in zip(rows, row_names(rows), strict=True):
        for entry in row.explanations:
            evidence = f" Shown by: {', '.join(entry.evidence)}." if entry.evidence else ""
            about.setdefault(entry.text + evidence, []).append(name)
    return [(", ".join(dict.fromkeys(names)), text) for text, names in about.items()]


def _empty(rows: Sequence[LedgerRow], lines: Sequence[LedgerLine]) -> list[tuple[str, str]]:
    drawn = {line.row for line in lines}
    return [(name, "nothing predicted, nothing observed") for name in row_names(rows) if name not in drawn]
