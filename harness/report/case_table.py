"""The table of a measured case: the fastest row, all rows with a time, fastest first, and notes; and what
others published of the case."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from harness.catalogue.published import PublishedFigure
from harness.report.fitting_table import Column, Columns, FittingTable, as_table
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

STYLES = {"faster": "green", "slower": "yellow", "same": "", "unclear": "dim"}
"""Styles of verdicts."""

LONGEST_BASELINE = 40
"""The longest name of a baseline, in characters, that stands in the header of a column. Headers do not wrap,
and in a race the name includes the configuration."""


def case_table(records: Sequence[Record], run: Run | None = None) -> RenderableType:
    """The heading, the fastest row, the ranking and the notes of one finished case. With the run, notes hold
    commands that check its wrong rows alone."""
    case = CaseResult.of(records)
    ranking: list[RenderableType] = [_ranking(case), ""] if case.timed else []
    return Group(heading(case.cells[0]), headline(case), "", *ranking, noted(case_notes(case, run)))


def heading(cell: Cell) -> RenderableType:
    """The cell's case; below it the case's place in the suite, and what all rows have in common."""
    place = f"{cell.place}, {100 * cell.weight:.1f} % of the suite" if cell.place != "ad hoc" else cell.place
    facts = f"{place}; {cell.platform} {cell.arch}, cache {cell.cache}"
    return Text.assemble((cell.case, "bold"), "\n", (facts, "dim"))


def headline(case: CaseResult) -> Text:
    """Which row is fastest, and how sure that is."""
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
    rows = [row for row in case.rows if row.cell.time_us is not None]
    limits = [row.cell.percent_of_ceiling for row in rows]
    return as_table(
        {Column("implementation", wraps=True): [row.cell.name for row in rows]}
        | columns_of(rows, case.baselines[0] if case.baselines else "baseline", host=True)
        | {
            Column("TFLOPS", spare=4): _rates(rows, [row.cell.tflops for row in rows]),
            Column("GB/s", spare=5): _rates(rows, [row.cell.gbps for row in rows]),
            Column("% of limit", right=True, spare=2): ["" if x is None else f"{x:.0f}" for x in limits],
        }
    )


def columns_of(rows: Sequence[Row], baseline: str, host: bool) -> Columns:
    """The columns of times, of ratios to the baseline and of verdicts.

    host: with a column of the times that the host needs to launch a call
    """
    header, times = time_column([interval(row.cell) for row in rows])
    ratios = ratio_column([row.verdict for row in rows])
    columns: Columns = {Column(header): times}
    if host:
        columns[Column("host", right=True, spare=3)] = [microseconds(row.cell.host_us) for row in rows]
    against = baseline if len(baseline) <= LONGEST_BASELINE else "baseline"
    columns[Column(f"vs {against}")] = [
        "baseline" if row.is_baseline else ratio for row, ratio in zip(rows, ratios, strict=True)
    ]
    columns[Column("verdict")] = [Text(row.word, STYLES.get(row.word, "")) for row in rows]
    return columns


def interval(timed: Cell) -> Interval:
    return timed.time_us or math.nan, timed.low_us, timed.high_us


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
    rows = [figure for figure in figures if figure.of(case.op, case.sizes)]
    if not rows:
        return None
    columns: Columns = {
        Column("implementation"): [row.implementation for row in rows],
        Column("device"): [row.device for row in rows],
        Column("time", right=True): [microseconds(row.time_us) for row in rows],
        Column("TFLOPS", right=True): [significant(row.tflops or None) for row in rows],
        Column("source; how it was timed", wraps=True): [f"{row.source}; {row.method}" for row in rows],
    }
    return Group("published by others, neither measured here nor ranked:", as_table(columns))
