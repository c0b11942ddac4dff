"""The table of a measured case: the fastest row, all rows with a time, fastest first, and notes; or its
settings (flags, revisions) and their effects. And what others published of a case."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from harness.catalogue.published import PublishedFigure
from harness.plan.settings import PLAIN
from harness.report import text
from harness.report.fitting_table import Column, Columns, FittingTable, as_table
from harness.report.notes import UNTIMED, Notes, case_notes, measuring, noted, reproductions, untimed
from harness.report.rows import (
    CaseResult,
    Row,
    SettingComparison,
    effect_word,
    first_setting,
    flag_effects,
    setting_comparisons,
)
from harness.report.terminal import plain
from harness.results.schema import Cell, Record, Run, Verdict
from harness.statistics.paired import MAX_NOISE
from kernels.engines import SPELLED
from shapes.case import Case

STYLES = {"faster": "green", "slower": "yellow", "same": "", "unclear": "dim"}  # styles of verdicts
LONG = 40  # characters of a setting in one line; a longer one has a line for each variable

LONGEST_BASELINE = 40
"""The longest name of a baseline in a header, in characters: in a race it includes the configuration."""


Part = Text | str | FittingTable | Notes  # what is printed of a case


def case_table(records: Sequence[Record], run: Run | None = None) -> RenderableType:
    """The heading, the fastest row, the ranking and the notes of one finished case; for a run of settings a
    table of these. With the run, notes hold commands that check its wrong rows alone."""
    return Group(*(noted(part) if isinstance(part, list) else part for part in case_parts(records, run)))


def case_markdown(records: Sequence[Record], run: Run) -> str:
    """The same for a pull request on GitHub; notes are folded."""
    heading, *parts = case_parts(records, run)
    blocks = ["### " + str(heading).replace("\n", "\n\n")]
    for part in parts:
        if isinstance(part, FittingTable):
            blocks.append(part.markdown())
        elif isinstance(part, list):
            notes = plain(noted(part))
            blocks.append(f"<details><summary>notes</summary>\n\n```\n{notes}\n```\n</details>")
        elif said := str(part):
            blocks.append(f"**{said}**" if isinstance(part, Text) else said)
    return "\n\n".join(blocks)


def case_parts(records: Sequence[Record], run: Run | None) -> list[Part]:
    """The heading of the case first."""
    case = CaseResult.of(records)
    if run and run.contrast == "settings":
        return _case_under_settings(case, run)
    ranking: list[Part] = [_ranking(case), ""] if case.timed else []
    return [heading(case.cells[0]), headline(case), "", *ranking, case_notes(case, run)]


def heading(cell: Cell) -> Text:
    """The cell's case; below it the case's place in the suite, and what all rows have in common."""
    place = f"{cell.place}, {100 * cell.weight:.1f} % of the suite" if cell.place != "ad hoc" else cell.place
    facts = f"{place}; {cell.platform} {cell.arch}, cache {cell.cache}"
    return Text.assemble((cell.case, "bold"), "\n", (facts, "dim"))


def headline(case: CaseResult) -> Text:
    """Which row is fastest, and how sure that is: against the second, and what engines run by default."""
    if not case.timed:
        counts = Counter[str](cell.status for cell in case.cells)
        worst_first = [f"{counts[status]} {status}" for status in UNTIMED if counts[status]]
        return Text(f"nothing has a time: {', '.join(worst_first)}".rstrip(": "))
    first, *others = case.timed
    name = Text(_name(first, case))
    name.stylize("bold green", 0, len(first.name))
    parts = [f" {text.time_with_unit(interval(first))}"]
    if not case.runner_up:
        parts.append("not compared with the second" if others else "nothing to compare it with")
    second = case.runner_up.b if case.runner_up else ""
    defaults = {c.impl: c.name for c in reversed(others) if case.engines_of(c) and c.impl != first.impl}
    for cell in others:
        found = case.compared(first, cell) if cell.name in (second, *defaults.values()) else None
        if found:
            noise = found.noise if isinstance(found, Verdict) else case.noise
            other = f"{default} {cell.name}" if (default := _default(cell, case)) else cell.name
            parts.append(text.versus(found, other, noise is None or noise > MAX_NOISE))
    if first.percent_of_ceiling is not None:
        parts.append(f"{first.percent_of_ceiling:.0f} % of this machine's limit")
    return Text.assemble("fastest: ", name, ", ".join(parts))


def _default(cell: Cell, case: CaseResult) -> str:
    """`SGLang's and vLLM's default` where these run the row by default; empty if none does."""
    engines = [f"{SPELLED[engine]}'s" for engine in case.engines_of(cell)]
    return f"{' and '.join(engines)} default" if engines else ""


def _name(cell: Cell, case: CaseResult) -> str:
    default = _default(cell, case)
    return f"{cell.name} ({default})" if default else cell.name


def _ranking(case: CaseResult) -> FittingTable:
    rows = [row for row in case.rows if row.cell.time_us]
    limits = [row.cell.percent_of_ceiling for row in rows]
    return as_table(
        {Column("implementation", wraps=True): [_name(row.cell, case) for row in rows]}
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
    header, times = text.time_column([interval(row.cell) for row in rows])
    ratios = text.ratio_column([row.verdict for row in rows])
    columns: Columns = {Column(header): times}
    if host:
        columns[Column("host", right=True, spare=3)] = [text.microseconds(row.cell.host_us) for row in rows]
    against = baseline if len(baseline) <= LONGEST_BASELINE else "baseline"
    columns[Column(f"vs {against}")] = [
        "baseline" if row.is_baseline else ratio for row, ratio in zip(rows, ratios, strict=True)
    ]
    columns[Column("verdict")] = [Text(row.word, STYLES.get(row.word, "")) for row in rows]
    return columns


def interval(timed: Cell) -> text.Interval:
    return timed.time_us or math.nan, timed.low_us, timed.high_us


def _rates(rows: Sequence[Row], rates: Sequence[float | None]) -> list[str]:
    """In the digits that the times support from which the rates were computed."""
    numbers = []
    for row, rate in zip(rows, rates, strict=True):
        value, low, high = row.cell.time_us, row.cell.low_us, row.cell.high_us
        if rate is None or not value or not low or not high:
            numbers.append(text.significant(rate))
        else:
            digits = text.decimals(rate * (high - low) / 2 / value)
            numbers.append(f"{rate:.{digits}f}")
    return text.aligned(numbers)


def published(figures: Iterable[PublishedFigure], case: Case) -> RenderableType | None:
    """What others published of a case, as a table of its own; None if there is nothing."""
    rows = [figure for figure in figures if figure.of(case.op, case.sizes)]
    if not rows:
        return None
    columns: Columns = {
        Column("implementation"): [row.implementation for row in rows],
        Column("device"): [row.device for row in rows],
        Column("time", right=True): [text.microseconds(row.time_us) for row in rows],
        Column("TFLOPS", right=True): [text.significant(row.tflops or None) for row in rows],
        Column("source; how it was timed", wraps=True): [f"{row.source}; {row.method}" for row in rows],
    }
    return Group("published by others, neither measured here nor ranked:", as_table(columns))


# Settings: flags, revisions


def _case_under_settings(case: CaseResult, run: Run) -> list[Part]:
    """Settings of each implementation, whether other kernels ran, and effects of flags over all settings."""
    comparisons = setting_comparisons(case, run)
    parts: list[Part] = [heading(case.cells[0]), ""]
    if case.timed:
        parts += [_settings(comparisons, run), ""]
    notes = [*untimed(_each_once(case.cells, run)), *reproductions(case.cells, run)]
    for comparison in comparisons:
        parts += _effects(comparison, run)
        notes += _what_ran(comparison)
    for comparison in comparisons:
        if comparison.noise is not None:
            pair = text.ratio_text(comparison.noise)
            notes.append(("noise", f"{comparison.name} against itself in other workers: {pair}"))
    return [*parts, [*notes, *measuring(case.done)]]


def _each_once(cells: Sequence[Cell], run: Run) -> list[Cell]:
    """An implementation that can run under no setting has one cell here instead of one for each setting."""
    first = next(iter(run.settings))
    never = {(c.impl, c.launch, c.reason) for c in cells if c.status == "unsupported" and c.setting == first}
    kept = []
    for cell in cells:
        if (cell.impl, cell.launch, cell.reason) not in never:
            kept.append(cell)
        elif cell.setting == first:
            kept.append(cell.model_copy(update={"setting": PLAIN}))
    return kept


def _settings(comparisons: Sequence[SettingComparison], run: Run) -> FittingTable:
    """A line for each setting with a time, below the first setting of its implementation."""
    every = [row for comparison in comparisons for row in (comparison.baseline, *comparison.others)]
    rows = [row for row in every if row.cell.time_us]
    return as_table(
        {Column("implementation, setting", wraps=True): [_setting_name(row) for row in rows]}
        | columns_of(rows, first_setting(run), host=False)
        | {Column("what ran", spare=1): [row.ran if row.verdict else "" for row in rows]}
    )


def _setting_name(row: Row) -> str:
    """The implementation with the first setting; below it the other settings, indented."""
    setting = row.cell.setting
    if row.is_baseline:
        return row.cell.name
    return "  " + (setting.replace(", ", ",\n  ") if len(setting) > LONG else setting)


def _what_ran(comparison: SettingComparison) -> Notes:
    """What ran under the first setting; and where another setting changed it, from what to what."""
    baseline = comparison.baseline.cell
    if baseline.time_us is None:
        return []
    ran = ", ".join(filter(None, [*baseline.kernels[:2], baseline.picked, *baseline.ran]))
    notes = [("what ran", f"{comparison.name}: {ran}")] if ran else []
    others = [row for row in comparison.others if row.verdict is not None and row.ran == "other kernels"]
    for change, rows in text.grouped(others, lambda row: row.change).items():
        settings = "; ".join(row.cell.setting for row in rows)
        notes.append(("what ran", f"{comparison.name} @ {settings}: {change}"))
    return notes


def _effects(comparison: SettingComparison, run: Run) -> Iterator[str | FittingTable]:
    found = flag_effects(comparison, run)
    if not found:
        return
    sure = f"all of them together {100 * run.confidence:.0f} % sure"
    yield f"effects of the flags on {comparison.name}, {sure}:"
    yield as_table(
        {
            Column("effect"): [effect.kind for effect in found],
            Column("change", wraps=True): [effect.what for effect in found],
            Column("speedup"): text.ratio_column([effect.comparison for effect in found]),
            Column("verdict"): [effect_word(effect) for effect in found],
        }
    )
    yield ""
