"""The table of a measured case: the fastest row, all rows with a time, fastest first, and notes; and what
others published of the case."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from harness.catalogue.published import PublishedFigure
from harness.report.notes import UNTIMED, case_notes, noted
from harness.report.rows import CaseResult, Row
from harness.report.text import (
    Interval,
    aligned,
    decimals,
    microseconds,
    ratio_column,
    significant,
    time_column,
    time_with_unit,
    uncertain_ratio,
)
from harness.results.schema import Cell, Record, Run, Verdict
from harness.statistics.paired import MAX_NOISE
from shapes.case import Case

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from harness.report.fitting_table import FittingTable

STYLES = {"faster": "green", "slower": "yellow", "same": "", "unclear": "dim"}
"""Styles of verdicts."""


def case_table(records: Sequence[Record], run: Run | None = None) -> RenderableType:
    """The heading, the fastest row, the ranking and the notes of one finished case. With the run, notes hold
    commands that check its wrong rows alone."""
    from rich.console import Group

    case = CaseResult.of(records)
    ranking: list[RenderableType] = [_ranking(case), ""] if case.timed else []
    return Group(heading(case.cells[0]), headline(case), "", *ranking, noted(case_notes(case, run)))


def heading(cell: Cell) -> RenderableType:
    """The cell's case; below it the case's place in the suite, and what all rows have in common."""
    from rich.text import Text

    place = f"{cell.place}, {100 * cell.weight:.1f} % of the suite" if cell.place != "ad hoc" else cell.place
    facts = f"{place}; {cell.platform} {cell.arch}, cache {cell.cache}"
    return Text.assemble((cell.case, "bold"), "\n", (facts, "dim"))


def headline(case: CaseResult) -> Text:
    """Which row is fastest, and how sure that is."""
    from rich.text import Text

    if not case.timed:
        counts = Counter[str](cell.status for cell in case.cells)
        worst_first = [f"{counts[status]} {status}" for status in UNTIMED if counts[status]]
        return Text(f"nothing has a time: {', '.join(worst_first)}")
    first = case.timed[0]
    if case.runner_up is not None:
        against = _against(case.runner_up)
    elif len(case.timed) == 1:
        against = "nothing to compare it with"
    else:
        against = "not compared with the second"
    limit = first.percent_of_ceiling
    share = f", {limit:.0f} % of this machine's limit" if limit is not None else ""
    time = time_with_unit(interval(first))
    return Text.assemble("fastest: ", (first.name, "bold green"), f" {time}, {against}{share}")


def _against(verdict: Verdict) -> str:
    """What a verdict says of its first row, in words."""
    value, ends = uncertain_ratio(verdict.ratio, verdict.low, verdict.high)
    if verdict.verdict == "faster":
        return f"{value} {verdict.b} {ends}"
    word = {"same": "the same as", "unclear": "not told from", "slower": "slower, round by round, than"}
    ends = ends.replace(" to ", "x to ").replace(")", "x)")
    too_noisy = verdict.verdict == "unclear" and (verdict.noise is None or verdict.noise > MAX_NOISE)
    noisy = ", too noisy" if too_noisy else ""
    return f"{word[verdict.verdict]} {verdict.b} {ends}".rstrip() + noisy


def _ranking(case: CaseResult) -> FittingTable:
    from harness.report.fitting_table import Column, FittingTable

    rows = [row for row in case.rows if row.cell.time_us is not None]
    time, times = time_column([interval(row.cell) for row in rows])
    baseline = case.baselines[0] if case.baselines else "baseline"
    limits = [row.cell.percent_of_ceiling for row in rows]
    columns: dict[Column, Sequence[str | Text]] = {
        Column("implementation", wraps=True): [row.cell.name for row in rows],
        Column(time): times,
        Column("host", right=True, spare=3): [microseconds(row.cell.host_us) for row in rows],
        Column(f"vs {baseline}"): ratios(rows),
        Column("verdict"): [styled(row.word) for row in rows],
        Column("TFLOPS", spare=4): _rates(rows, [row.cell.tflops for row in rows]),
        Column("GB/s", spare=5): _rates(rows, [row.cell.gbps for row in rows]),
        Column("% of limit", right=True, spare=2): ["" if x is None else f"{x:.0f}" for x in limits],
    }
    return FittingTable(list(columns), list(zip(*columns.values(), strict=True)))


def interval(timed: Cell) -> Interval:
    return timed.time_us or math.nan, timed.low_us, timed.high_us


def ratios(rows: Sequence[Row]) -> list[str]:
    """A column of ratios; a row that others are compared with has `baseline` in it."""
    verdicts = [row.verdict for row in rows]
    column = ratio_column([(v.ratio, v.low, v.high) if v else None for v in verdicts])
    return ["baseline" if row.is_baseline else cell for row, cell in zip(rows, column, strict=True)]


def styled(verdict: str) -> Text:
    """The verdict's word in its colour."""
    from rich.text import Text

    return Text(verdict, STYLES.get(verdict, ""))


def _rates(rows: Sequence[Row], rates: Sequence[float | None]) -> list[str]:
    """In the digits that the times support from which the rates were computed."""
    numbers = []
    for row, rate in zip(rows, rates, strict=True):
        value, low, high = row.cell.time_us, row.cell.low_us, row.cell.high_us
        if rate is None or not value or not low or not high:
            numbers.append(significant(rate))
        else:
            digits = decimals(rate * (high - low) / 2 / value)
            numbers.append(f"{rate:.{digits}f}")
    return aligned(numbers)


def published(figures: Iterable[PublishedFigure], case: Case) -> RenderableType | None:
    """What others published of a case, as a table of its own; None if there is nothing."""
    from rich.console import Group

    from harness.report.fitting_table import Column, FittingTable

    rows = [
        (
            f.implementation,
            f.device,
            microseconds(f.time_us),
            significant(f.tflops or None),
            f"{f.source}; {f.method}",
        )
        for f in figures
        if f.of(case.op, case.sizes)
    ]
    if not rows:
        return None
    columns = [
        Column("implementation"),
        Column("device"),
        Column("time", right=True),
        Column("TFLOPS", right=True),
        Column("source; how it was timed", wraps=True),
    ]
    return Group("published by others, neither measured here nor ranked:", FittingTable(columns, rows))
