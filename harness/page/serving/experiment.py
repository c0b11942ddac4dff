"""Section of a serving experiment: its ledger, and the pairs of live runs that the observations rest on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from harness import archive
from harness.errors import UsageError, mistake, one_line
from harness.page.document import Chart, PageSection, Table, TableRow, anchor
from harness.page.serving.ledger import ledger_section
from harness.page.serving.marks import cell
from harness.page.serving.pairs_charts import (
    QUANTITIES,
    PairedRuns,
    measured,
    paired_runs,
    pairs_chart,
    run_marks,
)
from harness.serving.experiment.spec import Experiment
from harness.serving.experiment.stages import PLAN
from harness.serving.ledger.ledger import NAME as LEDGER
from harness.serving.ledger.ledger import LedgerRow, known_rows
from harness.serving.live.ab.journal import FILE, LiveJournal


def experiment_section(folder: Path) -> PageSection:
    """Of a folder with experiment.json; what is not done yet is said. Raises UsageError."""
    experiment = _plan(folder)
    load = experiment.load
    name = folder.name or experiment.name
    rows = list(known_rows([str(folder)])) if (folder / LEDGER).exists() else []
    ledger = ledger_section(rows, f"{name}: predicted and observed")
    return PageSection(
        anchor=anchor("experiment", name),
        title=name,
        headline=ledger.headline,
        notes=[
            *([("about", experiment.about)] if experiment.about else []),
            *_setting(rows),
            (
                "load",
                f"{load.prompts} prompts of {load.input_len} tokens in and {load.output_len} out, "
                f"concurrency {load.concurrency}, {load.pairs} pairs a swap",
            ),
            ("again", "python -m harness " + shlex.join(["serving", "experiment", str(folder / PLAN)])),
        ],
        sections=[
            replace(ledger, headline=""),
            *(live_section(folder / "live" / swap.name, swap.name, name) for swap in experiment.swaps),
        ],
    )


def _setting(rows: Sequence[LedgerRow]) -> Iterator[tuple[str, str]]:
    """The machine, the engine and the model, as the first row has them."""
    for row in rows[:1]:
        yield "machine", row.setting.hardware
        yield "engine", " ".join(filter(None, [row.setting.engine, row.setting.version, row.setting.model]))


def _plan(folder: Path) -> Experiment:
    path = folder / PLAN
    try:
        return Experiment.model_validate_json(archive.read_bytes(path))
    except (OSError, ValidationError) as error:
        why = mistake(error) if isinstance(error, ValidationError) else one_line(error)
        raise UsageError(f"cannot read {path}: {why}") from None


def live_section(folder: Path, swap: str, experiment: str = "") -> PageSection:
    """Of a folder with the journal of live runs, of a swap. Raises UsageError."""
    where, title = anchor("live", experiment, swap), f"Live runs of {swap}"
    journal = folder / FILE
    if not journal.exists():
        return PageSection(anchor=where, title=title, headline="No live runs yet.")
    lines = LiveJournal(folder).lines()
    try:
        arms = [str(arm["name"]) for arm in lines[0]["arms"]] if lines else []
        by_arm = {arm: paired_runs(lines, arms[0], arm) for arm in arms[1:]}
        given_up = [
            (f"pair {line['pair'] + 1} given up", "; ".join(map(str, line["reasons"])))
            for line in lines
            if line["kind"] == "given_up"
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"cannot read {journal}: no journal of live runs: {one_line(error)}") from None
    pairs = [pair for of_arm in by_arm.values() for pair in of_arm]
    return PageSection(
        anchor=where,
        title=title,
        headline=_headline(pairs),
        charts=[chart for arm, of_arm in by_arm.items() for chart in _charts(of_arm, arms[0], arm, where)],
        notes=given_up,
    )


def _headline(pairs: list[PairedRuns]) -> str:
    if not pairs:
        return "No live runs yet."
    lost = sum(bool(pair.reason) for pair in pairs)
    return f"Pairs that count: {len(pairs) - lost}; attempts that do not: {lost}."


def _charts(pairs: list[PairedRuns], base: str, arm: str, where: str) -> Iterator[Chart]:
    quantities = measured(pairs)
    if not pairs:
        return
    yield Chart(
        anchor=anchor(where, arm),
        title=f"{arm} beside {base}, pair by pair",
        reading=(
            "A line is a pair: the same prompts to both engines, connected. Where the line leads to the same "
            "side in every pair, the change is no accident of one run. Hollow marks on dashed lines do not "
            "count, for the reason above them. The axes do not begin at zero."
        ),
        picture=pairs_chart(pairs, base, arm) if quantities else None,
        table=_table(pairs, quantities, base, arm),
        marks=sum(1 for quantity in quantities for _ in run_marks(pairs, quantity, base, arm)),
    )


def _table(pairs: list[PairedRuns], quantities: list[str], base: str, arm: str) -> Table:
    numeric = [
        f"{QUANTITIES[quantity]} {what}, ms"
        for quantity in quantities
        for what in (f"of {base}", f"of {arm}", "change")
    ]
    rows = []
    for pair in pairs:
        cells = []
        for quantity in quantities:
            before, after = pair.values[quantity]
            change = None if before is None or after is None else after - before
            cells += [cell(before), cell(after), cell(change, "+.5g")]
        rows.append(TableRow([pair.label, *cells, pair.reason or "yes"]))
    return Table(["pair", *numeric, "counts"], rows, frozenset(numeric))
