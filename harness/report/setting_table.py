"""The table of a case under settings (flags, revisions), effects of flags, and the recommendation at the
end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.plan.entry import entry_name
from harness.plan.settings import PLAIN
from harness.report.case_notes import Notes, measuring, noted, untimed, verdict_ratio
from harness.report.case_table import heading, interval, ratios, verdict_word
from harness.report.reproduce import reproductions
from harness.report.text import ratio_column, time_column
from harness.results.effects import Effect, changes, effects, regressions, same_kernels
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from harness.statistics.intervals import weighted_mean
from harness.statistics.paired import noise_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.report.fitting_table import FittingTable

TOGETHER = {"faster": "more together", "slower": "less together", "same": "independent", "unclear": "unclear"}
"""Of an interaction: what one change brings beside the other, against what it brings alone."""

LONG = 40  # characters of a setting in a line


@dataclass
class SettingComparison:
    """The settings of one implementation (and launch) in a case.

    baseline:   the first setting's cell
    others:   the other settings' cells with their verdicts against it; None where there is none
    noise:    what the baseline against itself in other workers came to; None: it has no time
    """

    baseline: Cell
    others: list[tuple[Cell, Verdict | None]]
    noise: Verdict | None

    @property
    def name(self) -> str:
        return entry_name(self.baseline.impl, PLAIN, self.baseline.launch, self.baseline.platform)


def setting_comparisons(records: Iterable[Record], run: Run) -> list[SettingComparison]:
    """Of a case, in the order of the record."""
    records = list(records)
    verdicts = {(v.a, v.about): v for v in records if isinstance(v, Verdict)}
    noises = {v.b: v for v in records if isinstance(v, Verdict) and v.about == "A/A"}
    cells: dict[tuple[str, str], list[Cell]] = {}
    for cell in records:
        if isinstance(cell, Cell) and cell.status != "unsupported":
            cells.setdefault((cell.impl, cell.launch), []).append(cell)
    first = next(iter(run.settings))
    comparisons = []
    for group in cells.values():
        if baseline := next((cell for cell in group if cell.setting == first), None):
            others = [(cell, verdicts.get((cell.name, "baseline"))) for cell in group if cell is not baseline]
            comparisons.append(SettingComparison(baseline, others, noises.get(baseline.name)))
    return comparisons


def case_table(records: Sequence[Record], run: Run) -> RenderableType:
    """Settings of each implementation, whether they changed what ran, and effects of flags over all
    settings."""
    from rich.console import Group

    cells = [r for r in records if isinstance(r, Cell)]
    done = next(r for r in records if isinstance(r, CaseDone))
    comparisons = setting_comparisons(records, run)
    parts: list[RenderableType] = [heading(cells[0]), ""]
    if any(cell.time_us is not None for cell in cells):
        parts += [_settings(comparisons, run), ""]
    for comparison in comparisons:
        parts += _effects(comparison, run)
    again = reproductions(cells, run)
    ran = [note for comparison in comparisons for note in _what_ran(comparison)]
    noises = [note for comparison in comparisons for note in _noise(comparison)]
    return Group(*parts, noted([*untimed(_each_once(cells, run)), *again, *ran, *noises, *measuring(done)]))


def first_setting(run: Run) -> str:
    """What the others are compared with, in a word."""
    return "plain" if next(iter(run.settings)) == "plain" else "the first"


def _each_once(cells: Sequence[Cell], run: Run) -> list[Cell]:
    """Whoever can run under no setting stands for all of them."""
    first = next(iter(run.settings))
    never = {(c.impl, c.launch, c.reason) for c in cells if c.status == "unsupported" and c.setting == first}
    again = [c for c in cells if c.setting != first and (c.impl, c.launch, c.reason) in never]
    return [c.model_copy(update={"setting": PLAIN}) if c.setting == first and c.status == "unsupported" else c
            for c in cells if c not in again]  # fmt: skip


def _settings(comparisons: Sequence[SettingComparison], run: Run) -> FittingTable:
    """A line for each setting with a time, below the first of its implementation."""
    from harness.report.fitting_table import Column, FittingTable

    rows = [
        (comparison, cell, verdict)
        for comparison in comparisons
        for cell, verdict in [(comparison.baseline, None), *comparison.others]
        if cell.time_us is not None
    ]
    time, times = time_column([interval(cell) for _, cell, _ in rows])
    columns = [
        Column("implementation, setting", wraps=True),
        Column(time),
        Column(f"vs {first_setting(run)}"),
        Column("verdict"),
        Column("what ran", spare=1),
    ]
    cells = zip(
        [
            cell.name if cell is comparison.baseline else _indented(cell.setting)
            for comparison, cell, _ in rows
        ],
        times,
        ratios([v for _, _, v in rows], [c is comparison.baseline for comparison, c, _ in rows]),
        [verdict_word(v) for _, _, v in rows],
        [
            ("the same" if same_kernels(comparison.baseline, cell) else "other kernels") if verdict else ""
            for comparison, cell, verdict in rows
        ],
        strict=True,
    )
    return FittingTable(columns, list(cells))


def _indented(setting: str) -> str:
    """A long one with a line for each variable."""
    return "  " + (setting.replace(", ", ",\n  ") if len(setting) > LONG else setting)


def _what_ran(comparison: SettingComparison) -> Notes:
    """Of the first setting; and where another changed it, from what to what."""
    baseline = comparison.baseline
    if baseline.time_us is None:
        return []
    ran = ", ".join(filter(None, [*baseline.kernels[:2], baseline.picked, *baseline.ran]))
    notes = [("what ran", f"{comparison.name}: {ran}")] if ran else []
    by_change: dict[str, list[str]] = {}
    for cell, verdict in comparison.others:
        if verdict is not None and not same_kernels(baseline, cell):
            by_change.setdefault(changes(baseline, cell), []).append(cell.setting)
    return notes + [
        ("what ran", f"{comparison.name} @ {'; '.join(settings)}: {c}") for c, settings in by_change.items()
    ]


def _noise(comparison: SettingComparison) -> Notes:
    if comparison.noise is None:
        return []
    pair = verdict_ratio(comparison.noise)
    return [("noise", f"{comparison.name} against itself in other workers: {pair}")]


def flag_effects(comparison: SettingComparison, run: Run) -> list[Effect]:
    """Over all settings: of each flag, and of two together; none where there is one flag, or no whole
    factorial."""
    if len(run.flags) < 2:
        return []
    cells = {cell.setting: cell for cell in (comparison.baseline, *(cell for cell, _ in comparison.others))}
    settings = {
        setting: {name: variables[name] for name in run.flags}
        for setting, variables in run.settings.items()
        if run.flags.keys() <= variables.keys() and setting in cells
    }
    noise = noise_of(comparison.noise.comparison) if comparison.noise else math.inf
    return effects(cells, settings, noise, run.confidence, run.margin)


def _effects(comparison: SettingComparison, run: Run) -> Iterator[RenderableType]:
    from harness.report.fitting_table import Column, FittingTable

    found = flag_effects(comparison, run)
    if not found:
        return
    speedups = ratio_column([(e.comparison.ratio, e.comparison.low, e.comparison.high) for e in found])
    verdicts = [
        TOGETHER[e.comparison.verdict] if e.kind == "interaction" else e.comparison.verdict for e in found
    ]
    sure = f"all of them together {100 * run.confidence:.0f} % sure"
    yield f"effects of the flags on {comparison.name}, {sure}:"
    columns = [Column("effect"), Column("change", wraps=True), Column("speedup"), Column("verdict")]
    rows = zip([e.kind for e in found], [e.what for e in found], speedups, verdicts, strict=True)
    yield FittingTable(columns, list(rows))
    yield ""


def conclusion(records: Sequence[Record], run: Run) -> RenderableType:
    """For each implementation: which setting to take, for which cases, worth how much; of revisions, what
    regressed."""
    from rich.console import Group
    from rich.padding import Padding

    title, lines = conclusion_lines(records, run)
    return Group(*filter(None, [title]), *(Padding(line, (0, 0, 0, 2)) for line in lines))


def conclusion_lines(records: Sequence[Record], run: Run) -> tuple[str, list[str]]:
    """A title, and a line for each implementation or regression."""
    by_case: dict[str, list[Record]] = {}
    for record in records:
        by_case.setdefault(getattr(record, "case", ""), []).append(record)
    by_name: dict[str, list[SettingComparison]] = {}
    for of_case in by_case.values():
        for comparison in setting_comparisons(of_case, run):
            if comparison.baseline.time_us is not None:
                by_name.setdefault(comparison.name, []).append(comparison)
    if run.trees:
        slower = [f"{v.a} at {v.case}: {verdict_ratio(v)}" for v in regressions(records)]
        if not by_name:
            return "nothing was measured, so nothing is known", []
        return (f"{len(slower)} regressed:", slower) if slower else ("nothing regressed", [])
    lines = [f"{name}: {_advice(comparisons, run.margin)}" for name, comparisons in by_name.items()]
    return ("recommendation:" if lines else "", lines)


def _advice(comparisons: Sequence[SettingComparison], margin: float) -> str:
    """The setting that is faster somewhere and worth most over all cases, by their weights."""
    settings = dict.fromkeys(cell.setting for comparison in comparisons for cell, _ in comparison.others)
    speedups = {setting: _speedup(comparisons, setting) for setting in settings}
    better = {setting: each for setting, each in speedups.items() if each.faster and each.mean > 1 + margin}
    if not better:
        losses = [
            f"{setting} is slower, {each.mean:.2f}x" for setting, each in speedups.items() if each.slower
        ]
        advice = f"leave it as it is, no setting brings {margin:.0%} over {comparisons[0].baseline.setting}"
        return "; ".join([advice, *losses])
    setting = max(better, key=lambda name: better[name].mean)
    best = better[setting]
    text = (
        f"{setting}: {best.mean:.2f}x over {best.cases} cases"
        if best.cases > 1
        else f"{setting}: {best.mean:.2f}x"
    )
    if best.cases > 1:
        text += f", faster in {len(best.faster)} of them"
    if best.slower:
        text += f"; but slower for {', '.join(best.slower)}"
    return text


@dataclass
class _Speedup:
    mean: float
    cases: int
    faster: list[str]
    slower: list[str]


def _speedup(comparisons: Sequence[SettingComparison], setting: str) -> _Speedup:
    """Of a setting: the geometric mean of its speedups weighted by the cases' weights, and where it is
    what."""
    pairs = [
        (comparison.baseline, verdict)
        for comparison in comparisons
        for cell, verdict in comparison.others
        if cell.setting == setting and verdict
    ]
    logs = [(baseline, math.log(verdict.ratio)) for baseline, verdict in pairs if verdict.ratio is not None]
    weights = [baseline.weight or 1.0 for baseline, _ in logs]
    mean = math.exp(weighted_mean([log for _, log in logs], weights)) if logs else 0.0

    def where(word: str) -> list[str]:
        return [baseline.case for baseline, verdict in pairs if verdict.verdict == word]

    return _Speedup(mean, len(logs), where("faster"), where("slower"))
