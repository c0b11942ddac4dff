"""`python -m harness serving ledger`: what was predicted, what was observed, and what explains it."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from harness import archive
from harness.errors import OK, UsageError
from harness.files import require_writable, write
from harness.paths import RESULTS
from harness.serving.ledger.ledger import Observation, Row, read, rows
from harness.serving.ledger.methods_table import is_wide, wide_table
from harness.serving.ledger.prediction import KernelChange
from harness.serving.ledger.published import published
from harness.serving.ledger.residuals import Held, held

NAME = "ledger.jsonl"
COLUMNS = ["row", "change", "quantity", "observed", "method", "predicted", "residual", "", "verdict"]
EXPLAINED = """
residual: observed less predicted change, and as a part of the observed one. In a column of a method: its
predicted change, and by what part of the observed one it was off. explained: the 90 % intervals meet, or,
where neither has one, the residual is within 15 %. not resolved: the observation does not tell the change
from none, or it is under 3 % of the value before. blind: the prediction was written down before the
observation. A bound says what one change alone can give at most."""


def show(files: Sequence[str], json_to: str | None = None) -> int:
    """Prints the rows of the ledgers named, or of all under results/ and the published points."""
    require_writable(json_to, None)
    found = list(_rows(files))
    judged = [one for row in found for one in held(row)]
    if json_to:
        whole = {"rows": [row.model_dump() for row in found], "held": [one.model_dump() for one in judged]}
        write(json_to, json.dumps(whole, indent=1, allow_nan=False) + "\n")
        return OK
    for ledger in dict.fromkeys(row.ledger for row in found):
        print(f"{ledger}")
        own = [row for row in found if row.ledger == ledger]
        if wide := [row for row in own if is_wide(row)]:
            print(wide_table(wide))
        if narrow := [row for row in own if not is_wide(row)]:
            print(tabulate([line for row in narrow for line in _lines(row)], COLUMNS, disable_numparse=True))
        for text, about in _explanations(own).items():
            print(
                textwrap.fill(
                    f"{about[0]}{' and others' if len(about) > 1 else ''}: {text}",
                    120,
                    subsequent_indent="    ",
                )
            )
        print()
    print(summary(judged))
    print(EXPLAINED)
    return OK


def summary(judged: Sequence[Held]) -> str:
    """How many of each verdict, by method: the misses are counted like the rest."""
    by_method = {one.method: Counter(h.verdict for h in judged if h.method == one.method) for one in judged}
    lines = [f"{method}: {', '.join(f'{n} {v}' for v, n in c.items())}" for method, c in by_method.items()]
    return "\n".join(lines) or "no prediction has an observation yet"


def _rows(files: Sequence[str]) -> Iterator[Row]:
    paths = [Path(name) for name in files] or sorted(RESULTS.glob(f"**/{NAME}"))
    for path in paths:
        path = path / NAME if path.is_dir() else path
        if not path.exists():
            raise UsageError(f"cannot read {path}: no such ledger")
        shown = path.relative_to(RESULTS.parent) if path.is_relative_to(RESULTS.parent) else path
        archive.verify(path.parent)
        yield from rows(read(path), str(shown))
    if not files:
        yield from published()


def _explanations(own: Sequence[Row]) -> dict[str, list[str]]:
    """Each text once, with the rows it is said of."""
    found: dict[str, list[str]] = {}
    for row in own:
        for one in row.explanations:
            found.setdefault(one.text, []).append(row.id)
    return found


def _lines(row: Row) -> Iterator[list[str]]:
    judged = held(row)
    head = [row.id, ", ".join(_change(one) for one in row.changes)]
    if not row.observations:
        for one in row.predictions:
            p = one.prediction
            yield [*head, p.quantity, "not observed yet", p.method, _value(p.change, p.low, p.high, p.unit)]
            head = ["", ""]
    for line in row.observations:
        one = line.observation
        mine = [h for h in judged if h.quantity == one.quantity]
        seen = f"{one.before:g} -> {one.after:g} {one.unit}, {_observed(one)}"
        if not mine:
            yield [*head, one.quantity, seen, "none", "", "", "", "no prediction"]
        for number, h in enumerate(mine):
            cells = [one.quantity, seen] if number == 0 else ["", ""]
            residual = "" if h.residual is None else f"{h.residual:+.3g} {h.unit}"
            part = "" if h.relative is None else f"{h.relative:+.0%}"
            verdict = h.verdict + (", blind" if h.blind else "")
            yield [
                *head,
                *cells,
                f"{h.method}: {h.of} alone" if h.of else h.method,
                _value(h.predicted, h.low, h.high, h.unit),
                residual,
                part,
                verdict,
            ]
            head = ["", ""]


def _observed(one: Observation) -> str:
    return _value(one.change, one.low, one.high, one.unit)


def _change(one: KernelChange) -> str:
    by = ""
    if one.factor is not None:
        by = f" {one.factor:g}x"
    elif one.saved_us is not None:
        by = f" saves {one.saved_us:g} us a call"
    return " ".join(filter(None, [one.op, one.part])) + by


def _value(value: float | None, low: float | None, high: float | None, unit: str) -> str:
    interval = "" if low is None and high is None else f"({_signed(low)}..{_signed(high)})"
    return " ".join(filter(None, ["" if value is None else f"{value:+.3g} {unit}", interval]))


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3g}"
