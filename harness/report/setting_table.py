"""The table of a case under settings (flags, revisions), effects of flags, and which setting to take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.plan.settings import PLAIN
from harness.report.case_table import heading, interval, ratios, styled
from harness.report.notes import Notes, measuring, noted, reproductions, untimed
from harness.report.rows import (
    Row,
    SettingComparison,
    effect_word,
    first_setting,
    flag_effects,
    setting_comparisons,
)
from harness.report.text import ratio_column, ratio_text, time_column
from harness.results.effects import regressions
from harness.results.schema import CaseDone, Cell, Record, Run
from harness.statistics.intervals import weighted_mean

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from harness.report.fitting_table import FittingTable

LONG = 40
"""Characters of a setting in one line; a longer one has a line for each variable."""


def case_table(records: Sequence[Record], run: Run) -> RenderableType:
    """Settings of each implementation, whether other kernels ran, and effects of flags over all settings."""
    from rich.console import Group

    cells = [r for r in records if isinstance(r, Cell)]
    done = next(r for r in records if isinstance(r, CaseDone))
    comparisons = setting_comparisons(records, run)
    parts: list[RenderableType] = [heading(cells[0]), ""]
    if any(cell.time_us is not None for cell in cells):
        parts += [_settings(comparisons, run), ""]
    notes = [*untimed(_each_once(cells, run)), *reproductions(cells, run)]
    for comparison in comparisons:
        parts += _effects(comparison, run)
        notes += _what_ran(comparison)
    for comparison in comparisons:
        if comparison.noise is not None:
            pair = ratio_text(comparison.noise)
            notes.append(("noise", f"{comparison.name} against itself in other workers: {pair}"))
    return Group(*parts, noted([*notes, *measuring(done)]))


def _each_once(cells: Sequence[Cell], run: Run) -> list[Cell]:
    """An implementation that can run under no setting has one cell here instead of one for each setting."""
    first = next(iter(run.settings))
    never = {(c.impl, c.launch, c.reason) for c in cells if c.status == "unsupported" and c.setting == first}
    kept = []
    for cell in cells:
        if cell.setting == first and cell.status == "unsupported":
            kept.append(cell.model_copy(update={"setting": PLAIN}))
        elif cell.setting == first or (cell.impl, cell.launch, cell.reason) not in never:
            kept.append(cell)
    return kept


def _settings(comparisons: Sequence[SettingComparison], run: Run) -> FittingTable:
    """A line for each setting with a time, below the first setting of its implementation."""
    from harness.report.fitting_table import Column, FittingTable

    every = [row for comparison in comparisons for row in (comparison.baseline, *comparison.others)]
    rows = [row for row in every if row.cell.time_us is not None]
    time, times = time_column([interval(row.cell) for row in rows])
    columns: dict[Column, Sequence[str | Text]] = {
        Column("implementation, setting", wraps=True): [_name(row) for row in rows],
        Column(time): times,
        Column(f"vs {first_setting(run)}"): ratios(rows),
        Column("verdict"): [styled(row.word) for row in rows],
        Column("what ran", spare=1): [row.ran if row.verdict else "" for row in rows],
    }
    return FittingTable(list(columns), list(zip(*columns.values(), strict=True)))


def _name(row: Row) -> str:
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
    by_change: dict[str, list[str]] = {}
    for row in comparison.others:
        if row.verdict is not None and row.ran == "other kernels":
            by_change.setdefault(row.change, []).append(row.cell.setting)
    return notes + [
        ("what ran", f"{comparison.name} @ {'; '.join(settings)}: {change}")
        for change, settings in by_change.items()
    ]


def _effects(comparison: SettingComparison, run: Run) -> Iterator[RenderableType]:
    from harness.report.fitting_table import Column, FittingTable

    found = flag_effects(comparison, run)
    if not found:
        return
    speedups = ratio_column([(e.comparison.ratio, e.comparison.low, e.comparison.high) for e in found])
    sure = f"all of them together {100 * run.confidence:.0f} % sure"
    yield f"effects of the flags on {comparison.name}, {sure}:"
    columns = [Column("effect"), Column("change", wraps=True), Column("speedup"), Column("verdict")]
    rows = [(e.kind, e.what, speedup, effect_word(e)) for e, speedup in zip(found, speedups, strict=True)]
    yield FittingTable(columns, rows)
    yield ""


def conclusion(records: Sequence[Record], run: Run) -> RenderableType:
    """For each implementation which setting to take, in which cases, and how much it brings; for revisions
    what regressed."""
    from rich.console import Group
    from rich.padding import Padding

    title, lines = conclusion_lines(records, run)
    titles = [title] if title else []
    return Group(*titles, *(Padding(line, (0, 0, 0, 2)) for line in lines))


def conclusion_lines(records: Sequence[Record], run: Run) -> tuple[str, list[str]]:
    """A title, and a line for each implementation or regression."""
    by_case: dict[str, list[Record]] = {}
    for record in records:
        by_case.setdefault(getattr(record, "case", ""), []).append(record)
    by_name: dict[str, list[SettingComparison]] = {}
    for of_case in by_case.values():
        for comparison in setting_comparisons(of_case, run):
            if comparison.baseline.cell.time_us is not None:
                by_name.setdefault(comparison.name, []).append(comparison)
    if run.trees:
        slower = [f"{v.a} at {v.case}: {ratio_text(v)}" for v in regressions(records)]
        if not by_name:
            return "nothing was measured, so nothing is known", []
        return (f"{len(slower)} regressed:", slower) if slower else ("nothing regressed", [])
    lines = [f"{name}: {_advice(comparisons, run.margin)}" for name, comparisons in by_name.items()]
    return ("recommendation:" if lines else "", lines)


def _advice(comparisons: Sequence[SettingComparison], margin: float) -> str:
    """The setting that is faster in some case and brings most over all cases, by their weights."""
    settings = dict.fromkeys(row.cell.setting for comparison in comparisons for row in comparison.others)
    speedups = {setting: _speedup(comparisons, setting) for setting in settings}
    better = {setting: each for setting, each in speedups.items() if each.faster and each.mean > 1 + margin}
    if not better:
        first = comparisons[0].baseline.cell.setting
        losses = [f"{name} is slower, {each.mean:.2f}x" for name, each in speedups.items() if each.slower]
        return "; ".join([f"leave it as it is, no setting brings {margin:.0%} over {first}", *losses])
    setting = max(better, key=lambda name: better[name].mean)
    best = better[setting]
    text = f"{setting}: {best.mean:.2f}x"
    if best.cases > 1:
        text += f" over {best.cases} cases, faster in {len(best.faster)} of them"
    if best.slower:
        text += f"; but slower for {', '.join(best.slower)}"
    return text


@dataclass
class _Speedup:
    """A setting over several cases."""

    mean: float
    """The geometric mean of its ratios to the first setting, weighted by the cases' weights."""
    cases: int
    faster: list[str]
    slower: list[str]


def _speedup(comparisons: Sequence[SettingComparison], setting: str) -> _Speedup:
    pairs = [
        (comparison.baseline.cell, row.verdict)
        for comparison in comparisons
        for row in comparison.others
        if row.cell.setting == setting and row.verdict
    ]
    logs = [(baseline, math.log(verdict.ratio)) for baseline, verdict in pairs if verdict.ratio is not None]
    weights = [baseline.weight or 1.0 for baseline, _ in logs]
    mean = math.exp(weighted_mean([log for _, log in logs], weights)) if logs else 0.0

    def where(word: str) -> list[str]:
        return [baseline.case for baseline, verdict in pairs if verdict.verdict == word]

    return _Speedup(mean, len(logs), where("faster"), where("slower"))
