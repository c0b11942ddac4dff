"""The table of a measured case: who is fastest, all that have a time, fastest first, and notes; what others
published of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from harness.catalogue.published import PublishedFigure
from harness.report.case_notes import UNTIMED, conclusions, measuring, noted, remarks, untimed
from harness.report.reproduce import reproductions
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
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from harness.statistics.paired import MAX_NOISE
from shapes.case import Case

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from harness.report.fitting_table import FittingTable

VERDICTS = {"faster": "green", "slower": "yellow", "same": "", "unclear": "dim"}
"""With their styles."""


def case_table(records: Sequence[Record], run: Run | None = None) -> RenderableType:
    """The table of one finished case: headline, ranking, notes; of a known run with commands that check its
    wrong rows alone."""
    from rich.console import Group

    cells = [r for r in records if isinstance(r, Cell)]
    verdicts = [r for r in records if isinstance(r, Verdict)]
    done = next(r for r in records if isinstance(r, CaseDone))
    order = sorted(cells, key=lambda cell: (cell.time_us or math.inf, cell.name))
    timed = [cell for cell in order if cell.time_us is not None]
    ranking: list[RenderableType] = [_ranking(timed, verdicts), ""] if timed else []
    notes = [
        *untimed(cells),
        *(reproductions(cells, run) if run else ()),
        *remarks(timed),
        *conclusions(cells, verdicts, done),
        *measuring(done, verdicts),
    ]
    return Group(heading(cells[0]), headline(timed, verdicts, cells), "", *ranking, noted(notes))


def heading(cell: Cell) -> RenderableType:
    """The cell's case; below it its place in the suite, and what all rows have alike."""
    from rich.text import Text

    place = f"{cell.place}, {100 * cell.weight:.1f} % of the suite" if cell.place != "ad hoc" else cell.place
    facts = f"{place}; {cell.platform} {cell.arch}, cache {cell.cache}"
    return Text.assemble((cell.case, "bold"), "\n", (facts, "dim"))


def headline(timed: Sequence[Cell], verdicts: Iterable[Verdict], cells: Iterable[Cell]) -> Text:
    """Who is fastest, and how surely."""
    from rich.text import Text

    if not timed:
        counts = Counter[str](cell.status for cell in cells)
        worst_first = [f"{counts[status]} {status}" for status in UNTIMED if counts[status]]
        return Text(f"nothing has a time: {', '.join(worst_first)}")
    first = timed[0]
    time = time_with_unit(interval(first))
    if (verdict := runner_up(timed, verdicts)) is not None:
        against = _against(verdict)
    else:
        against = "nothing to compare it with" if len(timed) == 1 else "not compared with the second"
    limit = first.percent_of_ceiling
    share = f", {limit:.0f} % of this machine's limit" if limit is not None else ""
    return Text.assemble("fastest: ", (first.name, "bold green"), f" {time}, {against}{share}")


def runner_up(timed: Sequence[Cell], verdicts: Iterable[Verdict]) -> Verdict | None:
    """Entries that memory splits into groups have one in each; the one that counts is that of whoever is
    fastest of all.

    timed: fastest first
    """
    return next((v for v in verdicts if v.about == "runner-up" and v.a == timed[0].name), None)


def _against(verdict: Verdict) -> str:
    """What a verdict says of its first, in words."""
    value, ends = uncertain_ratio(verdict.ratio, verdict.low, verdict.high)
    if verdict.verdict == "faster":
        return f"{value} {verdict.b} {ends}"
    word = {"same": "the same as", "unclear": "not told from", "slower": "slower, round by round, than"}
    ends = ends.replace(" to ", "x to ").replace(")", "x)")
    too_noisy = verdict.verdict == "unclear" and (verdict.noise is None or verdict.noise > MAX_NOISE)
    noisy = ", too noisy" if too_noisy else ""
    return f"{word[verdict.verdict]} {verdict.b} {ends}".rstrip() + noisy


def _ranking(timed: Sequence[Cell], verdicts: Iterable[Verdict]) -> FittingTable:
    from harness.report.fitting_table import Column, FittingTable

    verdicts = list(verdicts)
    against = {v.a: v for v in verdicts if v.about == "baseline"}
    baseline = next((v.b for v in verdicts if v.about == "A/A"), "")
    time, times = time_column([interval(cell) for cell in timed])
    columns = [
        Column("implementation", wraps=True),
        Column(time),
        Column("host", right=True, spare=3),
        Column(f"vs {baseline}" if baseline else "vs baseline"),
        Column("verdict"),
        Column("TFLOPS", spare=4),
        Column("GB/s", spare=5),
        Column("% of limit", right=True, spare=2),
    ]
    cells = zip(
        [cell.name for cell in timed],
        times,
        [microseconds(cell.host_us) for cell in timed],
        ratios([against.get(c.name) for c in timed], [c.name == baseline for c in timed]),
        [verdict_word(against.get(cell.name)) for cell in timed],
        _rates(timed, [cell.tflops for cell in timed]),
        _rates(timed, [cell.gbps for cell in timed]),
        [f"{c.percent_of_ceiling:.0f}" if c.percent_of_ceiling is not None else "" for c in timed],
        strict=True,
    )
    return FittingTable(columns, list(cells))


def interval(timed: Cell) -> Interval:
    return timed.time_us or math.nan, timed.low_us, timed.high_us


def ratios(verdicts: Sequence[Verdict | None], baselines: Sequence[bool]) -> list[str]:
    """A column of them; whoever is compared with says so."""
    known = [(v.ratio, v.low, v.high) if v else None for v in verdicts]
    return [
        "baseline" if baseline else cell
        for cell, baseline in zip(ratio_column(known), baselines, strict=True)
    ]


def verdict_word(verdict: Verdict | None) -> Text:
    """Coloured."""
    from rich.text import Text

    return Text(verdict.verdict, VERDICTS[verdict.verdict]) if verdict else Text()


def _rates(timed: Sequence[Cell], rates: Sequence[float | None]) -> list[str]:
    """As sure as the time they were divided by."""
    numbers = []
    for cell, rate in zip(timed, rates, strict=True):
        if rate is None or not cell.time_us or not cell.low_us or not cell.high_us:
            numbers.append(significant(rate))
        else:
            sure = decimals(rate * (cell.high_us - cell.low_us) / 2 / cell.time_us)
            numbers.append(f"{rate:.{sure}f}")
    return aligned(numbers)


def published(figures: Iterable[PublishedFigure], case: Case) -> RenderableType | None:
    """What others published of a case, a table of its own; None if nothing."""
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
