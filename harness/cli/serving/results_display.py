"""What `serving compare` and `serving ledger` print."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from harness.paths import command
from harness.report.fitting_table import table_of
from harness.report.notes import Notes, printed_notes
from harness.report.terminal import COMMAND, whole_line
from harness.report.text import grouped, ranged, significant
from harness.serving.compare.alike import Comparison, Quantity, all_gpus
from harness.serving.ledger import (
    MOST_OFF,
    TOLERANCE,
    KernelChange,
    LedgerLine,
    LedgerRow,
    Observation,
    Prediction,
    explanations,
    ledger_lines,
    unit_text,
)
from harness.serving.schema import Metric

NOT_COMPARED = "not alike, not compared"


def _answer(metric: Metric, ratio: float) -> str:
    """Which is better, and by how much. ratio: A over B"""
    more_is_better = "throughput" in metric.name
    better, other = ("A", "B") if (ratio >= 1) == more_is_better else ("B", "A")
    factor = max(ratio, 1 / ratio)
    one_each = "one run each: no interval"
    if f"{factor:.3g}" == "1":
        return f"A and B are equal ({one_each})"
    if more_is_better:
        return f"{better} is {factor:.3g}x as fast as {other} ({one_each})"
    if metric.unit in ("ms", "s", "us"):
        return f"{better} takes {100 - 100 / factor:.3g} % less than {other} ({one_each})"
    return f"A / B = {ratio:.4g} ({one_each})"


def comparison_text(a: Quantity, b: Quantity, comparison: Comparison) -> RenderableType:
    """The ratio, or that there is none; both numbers; and the reasons of a refusal, or the differences."""
    lines = []
    for name, quantity, side in (("A", a, comparison.a), ("B", b, comparison.b)):
        metric, run = quantity.metric, quantity.run
        gpus = f"{all_gpus(run)} " if all_gpus(run) else ""
        machine = f"{gpus}{run.hardware or 'unknown hardware'}"
        lines.append(f"{name}  {run.id}: {machine} {run.engine or 'unknown engine'} {run.version}".rstrip())
        number = f"{significant(metric.value, 4)} {metric.unit}"
        lines.append(f"   {_metric_text(metric)}: {number}, scope {metric.scope}")
        if side.steps:
            tokens = f" {side.tokens}" if side.tokens not in ("none", "unknown") else ""
            gpu = " a GPU" if side.scope == "gpu" else ""
            number = f"{significant(side.value, 4)}{tokens} {side.unit}{gpu}"
            lines.append(f"   normalised: {number}  ({'; '.join(side.steps)})")
    answer = NOT_COMPARED
    if comparison.ratio:
        after = ", after normalising" if comparison.verdict == "normalised" else ""
        answer = f"{_answer(a.metric, comparison.ratio)}, {_metric_text(a.metric)}{after}"
    notes = [("refused", reason.text) for reason in comparison.reasons]
    notes += [("differs", text) for text in comparison.differing]
    notes += [("uncertain", text) for text in comparison.uncertain]
    notes += [("found", text) for text in comparison.found]
    return Group(answer, *lines, "", printed_notes(notes))


def _metric_text(metric: Metric) -> str:
    """For example `mean tpot` or `throughput of output tokens`."""
    statistic = "" if metric.statistic == "total" else f"{metric.statistic} "
    tokens = "" if metric.tokens == "none" else f" of {metric.tokens} tokens"
    return f"{statistic}{metric.name}{tokens}"


WORDS: Notes = [
    ("explained", "the 90 % intervals of prediction and observation meet; where neither has one, they differ "
     f"by at most {100 * TOLERANCE:.0f} % of the observed change"),
    ("not resolved", "the interval of the observation holds 0, or it is of one pair and has none"),
    ("off by", "predicted less observed change, as a part of the observed one; in its unit where that is "
     f"over {100 * MOST_OFF:.0f} %, as the observed change is near 0"),
    ("blind", "the prediction was written before the observation"),
    ("bound", "the most that one change alone can give"),
    ("x before", "only the ratio of after to before was published"),
]  # fmt: skip
WORDS_OF_SUMMARY = WORDS[:3]


def ledger_json(rows: Sequence[LedgerRow]) -> str:
    lines = [
        {"row": line.row, "quantity": line.quantity, "unit": line.unit, "method": line.method,
         "off": line.off, "verdict": line.verdict, "blind": line.blind}
        for row in rows for line in ledger_lines(row)
    ]  # fmt: skip
    document = {"rows": [row.model_dump() for row in rows], "lines": lines}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def ledger_text(rows: Sequence[LedgerRow], with_rows: bool) -> RenderableType:
    """How many predictions of each method held; then the rows of each ledger, or only their number."""
    by_ledger = grouped(rows, lambda row: row.ledger)
    parts: list[RenderableType] = [_summary([line for row in rows for line in ledger_lines(row)]), ""]
    if not with_rows:
        parts += [table_of([{"ledger": name, "rows": len(own)} for name, own in by_ledger.items()]), ""]
        example = whole_line(COMMAND + command("serving", "ledger", next(iter(by_ledger), "LEDGER")))
        return Group(*parts, "the rows of one:", example, "", printed_notes(WORDS_OF_SUMMARY))
    for ledger, own in by_ledger.items():
        parts += [ledger, ""]
        for row in own:
            changes = ", ".join(map(_change, row.changes))
            parts += [f"{row.id}: {changes}", table_of([*_cells(row)]), ""]
        for text, ids in explanations(own).items():
            others = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
            parts += [f"{ids[0]}{others}: {text}", ""]
    return Group(*parts, printed_notes(WORDS))


def _summary(lines: Sequence[LedgerLine]) -> RenderableType:
    """For each method: how many of each verdict, and how far off it was if the change is resolved."""
    judged = [line for line in lines if line.prediction and line.observation]
    if not judged:
        return "no prediction has an observation yet"
    verdicts = dict.fromkeys(line.verdict for line in judged)
    rows = []
    for method, own in grouped(judged, lambda line: line.method).items():
        counts = Counter(line.verdict for line in own)
        off = [abs(line.off) for line in own if line.off is not None and line.verdict != "not resolved"]
        row = {"method": method} | {verdict: str(counts[verdict] or "") for verdict in verdicts}
        row["off by, median"] = f"{100 * statistics.median(off):.0f} %" if off else ""
        row["off by, most"] = f"{100 * max(off):.0f} %" if off else ""
        rows.append(row)
    return table_of(rows)


COLUMNS = ("quantity", "method", "change", "verdict", "off by", "before and after")


def _cells(row: LedgerRow) -> Iterator[dict[str, str]]:
    """The cells by COLUMNS: of each observation, and below it of the predictions of its quantity."""
    lines = ledger_lines(row)
    if not lines:
        yield dict.fromkeys(COLUMNS, "") | {"quantity": "neither predicted nor observed yet"}
    above = None  # the observation of the line before: lines of several predictions have the same one
    for line in lines:
        seen, predicted, quantity = line.observation, line.prediction, line.quantity
        if seen and seen is not above:
            verdict = "" if predicted else line.verdict
            sides = f"{significant(seen.before, 4)} -> {significant(seen.after, 4)} {unit_text(line.unit)}"
            cells = (quantity, "observed", _value(seen), verdict, "", sides)
            yield dict(zip(COLUMNS, cells, strict=True))
        if predicted:
            method = line.method + (f": {predicted.of} alone" if predicted.of else "")
            verdict = line.verdict + (", blind" if line.blind else "")
            cells = ("" if seen else quantity, method, _value(predicted), verdict, line.off_text, "")
            yield dict(zip(COLUMNS, cells, strict=True))
        above = seen


def _change(change: KernelChange) -> str:
    """`mla_decode 1.2x`, `fused_moe gate_up saves 3 us a call`"""
    words = [change.op, change.part]
    if change.saved_us is not None:
        words.append(f"saves {change.saved_us:g} us a call")
    elif change.factor is not None:
        words.append(f"{change.factor:g}x")
    return " ".join(word for word in words if word)


def _value(entry: Prediction | Observation) -> str:
    """`-8 ms (-9 to -7)`"""
    return ranged(entry.change, entry.low, entry.high, "+.3g", f" {unit_text(entry.unit)}")
