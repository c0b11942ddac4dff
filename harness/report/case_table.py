"""The text of a measured case: fastest row or effects of settings, a table, notes; published figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.text import Text

from harness.catalogue.published import PublishedFigure
from harness.plan.settings import PLAIN
from harness.report import text
from harness.report.fitting_table import Column, Columns, FittingTable, as_table
from harness.report.notes import UNTIMED, Notes, case_notes, measuring, printed_notes, reproductions, untimed
from harness.report.rows import (
    CaseResult,
    Row,
    SettingComparison,
    effect_word,
    first_setting_name,
    flag_effects,
    setting_comparisons,
)
from harness.report.terminal import plain_text
from harness.results.schema import Cell, Record, Run, Verdict
from harness.statistics.paired import MAX_NOISE
from kernels.engines import SPELLED
from shapes.case import Case

VERDICT_STYLES = {"faster": "green", "slower": "yellow", "same": "", "unclear": "dim"}
LONGEST_SETTING = 40  # characters of a setting in one line; a longer one has a line for each variable
LONGEST_BASELINE = 40
"""Characters of a baseline's name in a header. A longer one, such as a configuration's, is `baseline`."""

Part = Text | str | FittingTable | Notes
"""A part of the text of a case: a heading or sentence, a title or an empty line, a table, or notes."""


def case_table(records: Sequence[Record], run: Run | None = None) -> RenderableType:
    """The parts of a finished case, see `case_parts`, for a terminal."""
    parts = case_parts(records, run)
    return Group(*(printed_notes(part) if isinstance(part, list) else part for part in parts))


def case_markdown(records: Sequence[Record], run: Run) -> str:
    """The parts of a finished case, see `case_parts`, for a pull request on GitHub; notes are folded."""
    heading, *parts = case_parts(records, run)
    blocks = ["### " + str(heading).replace("\n", "\n\n")]
    for part in parts:
        if isinstance(part, FittingTable):
            blocks.append(part.markdown())
        elif isinstance(part, list):
            notes = plain_text(printed_notes(part))
            blocks.append(f"<details><summary>notes</summary>\n\n```\n{notes}\n```\n</details>")
        elif isinstance(part, Text):
            blocks.append(f"**{part}**")
        elif part:
            blocks.append(part)
    return "\n\n".join(blocks)


def case_parts(records: Sequence[Record], run: Run | None) -> list[Part]:
    """The heading, the fastest row, the ranking and the notes of one finished case; for a run of settings the
    heading, a table of the settings, effects of flags, and notes. With the run there are `check` commands."""
    case = CaseResult.of(records)
    if run and run.contrast == "settings":
        return _case_under_settings(case, run)
    parts: list[Part] = [heading(case.cells[0]), headline(case), ""]
    if case.timed:
        parts += [_ranking(case), ""]
    return [*parts, case_notes(case, run)]


def heading(cell: Cell) -> Text:
    """The case of the cell; below it what all cells of the case have in common, such as the platform."""
    place = f"{cell.place}, {100 * cell.weight:.1f} % of the suite" if cell.place != "ad hoc" else cell.place
    facts = f"{place}; {cell.platform} {cell.arch}, cache {cell.cache}"
    return Text.assemble((cell.case, "bold"), "\n", (facts, "dim"))


def headline(case: CaseResult) -> Text:
    """The fastest row with its time, what it gains over the second row and over the fastest row of each other
    implementation that an engine runs by default, and its share of the machine's limit."""
    if not case.timed:
        counts = Counter[str](cell.status for cell in case.cells)
        worst_first = [f"{counts[status]} {status}" for status in UNTIMED if counts[status]]
        return Text(f"nothing has a time: {', '.join(worst_first)}".rstrip(": "))
    first, *others = case.timed
    name = Text(_name_and_default(first, case))
    name.stylize("bold green", 0, len(first.name))
    parts = [f" {text.time_with_unit(_time(first))}"]
    against_second = case.first_against_second
    if not against_second:
        parts.append("not compared with the second" if others else "nothing to compare it with")
    defaults = [cell for cell in others if case.engines_of(cell) and cell.impl != first.impl]
    fastest_defaults = [group[0].name for group in text.grouped(defaults, lambda cell: cell.impl).values()]
    for cell in others:
        is_second = against_second is not None and cell.name == against_second.b
        if (is_second or cell.name in fastest_defaults) and (comparison := case.comparison(first, cell)):
            noise = comparison.noise if isinstance(comparison, Verdict) else case.noise
            other = f"{_whose_default(cell, case)} {cell.name}".lstrip()
            parts.append(text.versus(comparison, other, too_noisy=noise is None or noise > MAX_NOISE))
    if first.percent_of_ceiling is not None:
        parts.append(f"{first.percent_of_ceiling:.0f} % of this machine's limit")
    return Text.assemble("fastest: ", name, ", ".join(parts))


def _whose_default(cell: Cell, case: CaseResult) -> str:
    """`SGLang's and vLLM's default` where these run the row by default; empty if none does."""
    engines = [f"{SPELLED[engine]}'s" for engine in case.engines_of(cell)]
    return f"{' and '.join(engines)} default" if engines else ""


def _name_and_default(cell: Cell, case: CaseResult) -> str:
    default = _whose_default(cell, case)
    return f"{cell.name} ({default})" if default else cell.name


def _ranking(case: CaseResult) -> FittingTable:
    """The rows with a time, the fastest first."""
    rows = [row for row in case.rows if row.cell.time_us]
    limits = [row.cell.percent_of_ceiling for row in rows]
    names = {Column("implementation", wraps=True): [_name_and_default(row.cell, case) for row in rows]}
    times = _time_columns(rows, case.baselines[0] if case.baselines else "baseline", with_launch_times=True)
    rates = {Column("TFLOPS", spare=4): _rates(rows, "tflops"), Column("GB/s", spare=5): _rates(rows, "gbps")}
    shares = ["" if limit is None else f"{limit:.0f}" for limit in limits]
    return as_table(names | times | rates | {Column("% of limit", right=True, spare=2): shares})


def _time_columns(rows: Sequence[Row], baseline: str, with_launch_times: bool) -> Columns:
    """The columns of times, perhaps of the host's launch times, of ratios to the baseline and verdicts."""
    header, times = text.time_column([_time(row.cell) for row in rows])
    ratios = text.ratio_column([row.verdict for row in rows])
    columns: Columns = {Column(header): times}
    if with_launch_times:
        columns[Column("host", right=True, spare=3)] = [text.microseconds(row.cell.host_us) for row in rows]
    against = baseline if len(baseline) <= LONGEST_BASELINE else "baseline"
    cells = ["baseline" if row.is_baseline else ratio for row, ratio in zip(rows, ratios, strict=True)]
    columns[Column(f"vs {against}")] = cells
    columns[Column("verdict")] = [Text(row.word, VERDICT_STYLES.get(row.word, "")) for row in rows]
    return columns


def _time(cell: Cell) -> text.TimeInterval:
    return text.TimeInterval(cell.time_us or math.nan, cell.low_us, cell.high_us)


def _rates(rows: Sequence[Row], attribute: Literal["tflops", "gbps"]) -> list[str]:
    """A rate of each row, in the digits that the interval of the row's time supports."""
    numbers = []
    for cell in (row.cell for row in rows):
        rate = getattr(cell, attribute)
        if rate is None or not cell.time_us or not cell.low_us or not cell.high_us:
            numbers.append(text.significant(rate))
        else:
            half_width = (cell.high_us - cell.low_us) / 2
            digits = text.decimals(rate * half_width / cell.time_us)
            numbers.append(f"{rate:.{digits}f}")
    return text.aligned(numbers)


def published(figures: Iterable[PublishedFigure], case: Case) -> RenderableType | None:
    """A table of the figures that are about the case; None if there are none."""
    of_case = [figure for figure in figures if figure.of(case.op, case.sizes)]
    if not of_case:
        return None
    columns = (Column("implementation"), Column("device"), Column("time", right=True),
               Column("TFLOPS", right=True), Column("source; how it was timed", wraps=True))  # fmt: skip
    cells = [(f.implementation, f.device, text.microseconds(f.time_us), text.significant(f.tflops or None),
              f"{f.source}; {f.method}") for f in of_case]  # fmt: skip
    return Group("published by others, neither measured here nor ranked:", FittingTable(columns, cells))


# Settings: flags, revisions


def _case_under_settings(case: CaseResult, run: Run) -> list[Part]:
    """The parts of a case, see `case_parts`: the settings of each implementation are compared."""
    comparisons = setting_comparisons(case, run)
    parts: list[Part] = [heading(case.cells[0]), ""]
    if case.timed:
        parts += [_settings(comparisons, run), ""]
    notes = [*untimed(_unsupported_once(case.cells, run)), *reproductions(case.cells, run)]
    noises: Notes = []
    for comparison in comparisons:
        parts += _effects(comparison, run)
        notes += _what_ran(comparison)
        if comparison.noise:
            ratio = text.ratio_text(comparison.noise)
            noises.append(("noise", f"{comparison.name} against itself in other workers: {ratio}"))
    return [*parts, [*notes, *noises, *measuring(case.done)]]


def _unsupported_once(cells: Sequence[Cell], run: Run) -> list[Cell]:
    """The cells, without repetition of what is unsupported for one reason under every setting: of these cells
    only the one under the first setting is left, and its name has no setting."""
    under_first = [c for c in cells if c.status == "unsupported" and c.setting == run.first_setting]
    said = {(c.impl, c.launch, c.reason) for c in under_first}
    kept = []
    for cell in cells:
        if (cell.impl, cell.launch, cell.reason) not in said:
            kept.append(cell)
        elif cell.setting == run.first_setting:
            kept.append(cell.model_copy(update={"setting": PLAIN}))
    return kept


def _settings(comparisons: Sequence[SettingComparison], run: Run) -> FittingTable:
    """A line for each setting with a time, below the first setting of its implementation."""
    rows = [row for c in comparisons for row in (c.baseline, *c.others) if row.cell.time_us]
    names = {Column("implementation, setting", wraps=True): [_setting_name(row) for row in rows]}
    times = _time_columns(rows, first_setting_name(run), with_launch_times=False)
    ran = {Column("what ran", spare=1): [row.ran if row.verdict else "" for row in rows]}
    return as_table(names | times | ran)


def _setting_name(row: Row) -> str:
    """The name of the cell under the first setting; of the others the setting alone, indented."""
    if row.is_baseline:
        return row.cell.name
    separator = ",\n  " if len(row.cell.setting) > LONGEST_SETTING else ", "
    return "  " + row.cell.setting.replace(", ", separator)


def _what_ran(comparison: SettingComparison) -> Notes:
    """A note on the kernels that ran under the first setting, and one for each change by other settings."""
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


def _effects(comparison: SettingComparison, run: Run) -> list[Part]:
    """The effects of the flags on an implementation, with a title; empty where there are none."""
    effects = flag_effects(comparison, run)
    if not effects:
        return []
    sure = f"all of them together {100 * run.confidence:.0f} % sure"
    columns: Columns = {
        Column("effect"): [effect.kind for effect in effects],
        Column("change", wraps=True): [effect.what for effect in effects],
        Column("speedup"): text.ratio_column([effect.comparison for effect in effects]),
        Column("verdict"): [effect_word(effect) for effect in effects],
    }
    return [f"effects of the flags on {comparison.name}, {sure}:", as_table(columns), ""]
