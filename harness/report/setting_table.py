"""The table of a case under settings (flags, revisions), effects of flags, and which setting to take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding

from harness.plan.settings import PLAIN
from harness.report.case_table import columns_of, heading
from harness.report.fitting_table import Column, FittingTable, as_table
from harness.report.notes import Notes, measuring, noted, reproductions, untimed
from harness.report.rows import (
    Row,
    SettingComparison,
    effect_word,
    first_setting,
    flag_effects,
    grouped,
    setting_comparisons,
)
from harness.report.text import ratio_column, ratio_text
from harness.results.effects import regressions
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from harness.statistics.intervals import weighted_mean

LONG = 40
"""Characters of a setting in one line; a longer one has a line for each variable."""


def case_table(records: Sequence[Record], run: Run) -> RenderableType:
    """Settings of each implementation, whether other kernels ran, and effects of flags over all settings."""
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
        if (cell.impl, cell.launch, cell.reason) not in never:
            kept.append(cell)
        elif cell.setting == first:
            kept.append(cell.model_copy(update={"setting": PLAIN}))
    return kept


def _settings(comparisons: Sequence[SettingComparison], run: Run) -> FittingTable:
    """A line for each setting with a time, below the first setting of its implementation."""
    every = [row for comparison in comparisons for row in (comparison.baseline, *comparison.others)]
    rows = [row for row in every if row.cell.time_us is not None]
    return as_table(
        {Column("implementation, setting", wraps=True): [_name(row) for row in rows]}
        | columns_of(rows, first_setting(run), host=False)
        | {Column("what ran", spare=1): [row.ran if row.verdict else "" for row in rows]}
    )


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
    others = [row for row in comparison.others if row.verdict is not None and row.ran == "other kernels"]
    for change, rows in grouped(others, lambda row: row.change).items():
        settings = "; ".join(row.cell.setting for row in rows)
        notes.append(("what ran", f"{comparison.name} @ {settings}: {change}"))
    return notes


def _effects(comparison: SettingComparison, run: Run) -> Iterator[RenderableType]:
    found = flag_effects(comparison, run)
    if not found:
        return
    sure = f"all of them together {100 * run.confidence:.0f} % sure"
    yield f"effects of the flags on {comparison.name}, {sure}:"
    yield as_table(
        {
            Column("effect"): [effect.kind for effect in found],
            Column("change", wraps=True): [effect.what for effect in found],
            Column("speedup"): ratio_column([effect.comparison for effect in found]),
            Column("verdict"): [effect_word(effect) for effect in found],
        }
    )
    yield ""


def conclusion(records: Sequence[Record], run: Run) -> RenderableType:
    """For each implementation which setting to take, in which cases, and how much it brings; for revisions
    what regressed."""
    title, lines = conclusion_lines(records, run)
    return Group(*filter(None, [title]), *(Padding(line, (0, 0, 0, 2)) for line in lines))


def conclusion_lines(records: Sequence[Record], run: Run) -> tuple[str, list[str]]:
    """A title, and a line for each implementation or regression."""
    by_case = grouped(records, lambda record: getattr(record, "case", "")).values()
    comparisons = [comparison for of_case in by_case for comparison in setting_comparisons(of_case, run)]
    timed = [comparison for comparison in comparisons if comparison.baseline.cell.time_us is not None]
    by_name = grouped(timed, lambda comparison: comparison.name)
    if run.trees:
        slower = [f"{v.a} at {v.case}: {ratio_text(v)}" for v in regressions(records)]
        if not by_name:
            return "nothing was measured, so nothing is known", []
        return (f"{len(slower)} regressed:", slower) if slower else ("nothing regressed", [])
    lines = [f"{name}: {_advice(comparisons, run.margin)}" for name, comparisons in by_name.items()]
    return ("recommendation:" if lines else "", lines)


def _advice(comparisons: Sequence[SettingComparison], margin: float) -> str:
    """The setting that is faster in some case and brings most over all cases, by their weights."""
    by_setting: dict[str, list[tuple[Cell, Verdict]]] = {}
    for comparison in comparisons:
        for row in comparison.others:
            if row.verdict and row.verdict.ratio is not None:
                by_setting.setdefault(row.cell.setting, []).append((comparison.baseline.cell, row.verdict))
    means = {setting: _mean_speedup(pairs) for setting, pairs in by_setting.items()}
    faster = {setting: _cases(pairs, "faster") for setting, pairs in by_setting.items()}
    slower = {setting: _cases(pairs, "slower") for setting, pairs in by_setting.items()}
    better = [setting for setting in by_setting if faster[setting] and means[setting] > 1 + margin]
    if not better:
        first = comparisons[0].baseline.cell.setting
        losses = [f"{name} is slower, {means[name]:.2f}x" for name in by_setting if slower[name]]
        return "; ".join([f"leave it as it is, no setting brings {margin:.0%} over {first}", *losses])
    best = max(better, key=means.__getitem__)
    text = f"{best}: {means[best]:.2f}x"
    if len(by_setting[best]) > 1:
        text += f" over {len(by_setting[best])} cases, faster in {len(faster[best])} of them"
    if slower[best]:
        text += f"; but slower for {', '.join(slower[best])}"
    return text


def _mean_speedup(pairs: Sequence[tuple[Cell, Verdict]]) -> float:
    """The geometric mean of a setting's ratios to the first setting, weighted by the cases' weights."""
    logs = [math.log(verdict.ratio or math.nan) for _, verdict in pairs]
    return math.exp(weighted_mean(logs, [cell.weight or 1.0 for cell, _ in pairs]))


def _cases(pairs: Sequence[tuple[Cell, Verdict]], word: str) -> list[str]:
    return [cell.case for cell, verdict in pairs if verdict.verdict == word]
