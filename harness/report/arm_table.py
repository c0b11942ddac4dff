"""The table of a case under arms (flags, revisions), effects of flags, and the recommendation at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.plan.arms import PLAIN
from harness.plan.contender import contender_name
from harness.report.case_notes import Notes, measuring, noted, untimed, verdict_ratio
from harness.report.case_table import heading, interval, ratios, verdict_word
from harness.report.reproduce import reproductions
from harness.report.text import ratio_column, time_column
from harness.results.effects import Effect, changes, effects, regressions, same_kernels
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from harness.statistics.intervals import weighted_mean
from harness.statistics.paired import noise_floor

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.report.fitting_table import FittingTable

TOGETHER = {"faster": "more together", "slower": "less together", "same": "independent", "unclear": "unclear"}
"""Of an interaction: what one change brings beside the other, against what it brings alone."""

LONG = 40  # characters of an arm in a line


@dataclass
class ArmComparison:
    """The arms of one implementation (and launch) in a case.

    anchor:   the first arm's cell
    others:   the other arms' cells with their verdicts against it; None where there is none
    floor:    what the anchor against itself in other workers came to; None: it has no time
    """

    anchor: Cell
    others: list[tuple[Cell, Verdict | None]]
    floor: Verdict | None

    @property
    def name(self) -> str:
        return contender_name(self.anchor.impl, PLAIN, self.anchor.launch, self.anchor.platform)


def arm_comparisons(records: Iterable[Record], run: Run) -> list[ArmComparison]:
    """Of a case, in the order of the record."""
    records = list(records)
    verdicts = {(v.a, v.about): v for v in records if isinstance(v, Verdict)}
    floors = {v.b: v for v in records if isinstance(v, Verdict) and v.about == "A/A"}
    cells: dict[tuple[str, str], list[Cell]] = {}
    for cell in records:
        if isinstance(cell, Cell) and cell.status != "unsupported":
            cells.setdefault((cell.impl, cell.launch), []).append(cell)
    first = next(iter(run.arms))
    comparisons = []
    for group in cells.values():
        if anchor := next((cell for cell in group if cell.arm == first), None):
            others = [(cell, verdicts.get((cell.name, "baseline"))) for cell in group if cell is not anchor]
            comparisons.append(ArmComparison(anchor, others, floors.get(anchor.name)))
    return comparisons


def case_table(records: Sequence[Record], run: Run) -> RenderableType:
    """Arms of each implementation, whether they changed what ran, and effects of flags over all arms."""
    from rich.console import Group

    cells = [r for r in records if isinstance(r, Cell)]
    done = next(r for r in records if isinstance(r, CaseDone))
    comparisons = arm_comparisons(records, run)
    parts: list[RenderableType] = [heading(cells[0]), ""]
    if any(cell.time_us is not None for cell in cells):
        parts += [_arms(comparisons, run), ""]
    for comparison in comparisons:
        parts += _effects(comparison, run)
    again = reproductions(cells, run)
    ran = [note for comparison in comparisons for note in _what_ran(comparison)]
    floors = [note for comparison in comparisons for note in _floor(comparison)]
    return Group(*parts, noted([*untimed(_each_once(cells, run)), *again, *ran, *floors, *measuring(done)]))


def first_arm(run: Run) -> str:
    """What the others are compared with, in a word."""
    return "plain" if next(iter(run.arms)) == "plain" else "the first"


def _each_once(cells: Sequence[Cell], run: Run) -> list[Cell]:
    """Whoever can run under no arm stands for all of them."""
    first = next(iter(run.arms))
    never = {(c.impl, c.launch, c.reason) for c in cells if c.status == "unsupported" and c.arm == first}
    again = [c for c in cells if c.arm != first and (c.impl, c.launch, c.reason) in never]
    return [c.model_copy(update={"arm": PLAIN}) if c.arm == first and c.status == "unsupported" else c
            for c in cells if c not in again]  # fmt: skip


def _arms(comparisons: Sequence[ArmComparison], run: Run) -> FittingTable:
    """A line for each arm with a time, below the first of its implementation."""
    from harness.report.fitting_table import Column, FittingTable

    rows = [
        (comparison, cell, verdict)
        for comparison in comparisons
        for cell, verdict in [(comparison.anchor, None), *comparison.others]
        if cell.time_us is not None
    ]
    time, times = time_column([interval(cell) for _, cell, _ in rows])
    columns = [
        Column("implementation, arm", wraps=True),
        Column(time),
        Column(f"vs {first_arm(run)}"),
        Column("verdict"),
        Column("what ran", spare=1),
    ]
    cells = zip(
        [cell.name if cell is comparison.anchor else _indented(cell.arm) for comparison, cell, _ in rows],
        times,
        ratios([v for _, _, v in rows], [c is comparison.anchor for comparison, c, _ in rows]),
        [verdict_word(v) for _, _, v in rows],
        [
            ("the same" if same_kernels(comparison.anchor, cell) else "other kernels") if verdict else ""
            for comparison, cell, verdict in rows
        ],
        strict=True,
    )
    return FittingTable(columns, list(cells))


def _indented(arm: str) -> str:
    """A long one with a line for each variable."""
    return "  " + (arm.replace(", ", ",\n  ") if len(arm) > LONG else arm)


def _what_ran(comparison: ArmComparison) -> Notes:
    """Of the first arm; and where another changed it, from what to what."""
    anchor = comparison.anchor
    if anchor.time_us is None:
        return []
    ran = ", ".join(filter(None, [*anchor.kernels[:2], anchor.picked, *anchor.ran]))
    notes = [("what ran", f"{comparison.name}: {ran}")] if ran else []
    by_change: dict[str, list[str]] = {}
    for cell, verdict in comparison.others:
        if verdict is not None and not same_kernels(anchor, cell):
            by_change.setdefault(changes(anchor, cell), []).append(cell.arm)
    return notes + [
        ("what ran", f"{comparison.name} @ {'; '.join(arms)}: {c}") for c, arms in by_change.items()
    ]


def _floor(comparison: ArmComparison) -> Notes:
    if comparison.floor is None:
        return []
    pair = verdict_ratio(comparison.floor)
    return [("noise floor", f"{comparison.name} against itself in other workers: {pair}")]


def flag_effects(comparison: ArmComparison, run: Run) -> list[Effect]:
    """Over all settings: of each flag, and of two together; none where there is one flag, or no whole
    factorial."""
    if len(run.flags) < 2:
        return []
    cells = {cell.arm: cell for cell in (comparison.anchor, *(cell for cell, _ in comparison.others))}
    settings = {
        arm: {name: variables[name] for name in run.flags}
        for arm, variables in run.arms.items()
        if run.flags.keys() <= variables.keys() and arm in cells
    }
    floor = noise_floor(comparison.floor.comparison) if comparison.floor else math.inf
    return effects(cells, settings, floor, run.confidence, run.margin)


def _effects(comparison: ArmComparison, run: Run) -> Iterator[RenderableType]:
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
    """For each implementation: which arm to take, for which cases, worth how much; of revisions, what
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
    by_name: dict[str, list[ArmComparison]] = {}
    for of_case in by_case.values():
        for comparison in arm_comparisons(of_case, run):
            if comparison.anchor.time_us is not None:
                by_name.setdefault(comparison.name, []).append(comparison)
    if run.trees:
        slower = [f"{v.a} at {v.case}: {verdict_ratio(v)}" for v in regressions(records)]
        if not by_name:
            return "nothing was measured, so nothing is known", []
        return (f"{len(slower)} regressed:", slower) if slower else ("nothing regressed", [])
    lines = [f"{name}: {_advice(comparisons, run.margin)}" for name, comparisons in by_name.items()]
    return ("recommendation:" if lines else "", lines)


def _advice(comparisons: Sequence[ArmComparison], margin: float) -> str:
    """The arm that is faster somewhere and worth most over all cases, by their weights."""
    arms = dict.fromkeys(cell.arm for comparison in comparisons for cell, _ in comparison.others)
    speedups = {arm: _speedup(comparisons, arm) for arm in arms}
    better = {arm: each for arm, each in speedups.items() if each.faster and each.mean > 1 + margin}
    if not better:
        losses = [f"{arm} is slower, {each.mean:.2f}x" for arm, each in speedups.items() if each.slower]
        advice = f"leave it as it is, no arm brings {margin:.0%} over {comparisons[0].anchor.arm}"
        return "; ".join([advice, *losses])
    arm = max(better, key=lambda name: better[name].mean)
    best = better[arm]
    text = (
        f"{arm}: {best.mean:.2f}x over {best.cases} cases" if best.cases > 1 else f"{arm}: {best.mean:.2f}x"
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


def _speedup(comparisons: Sequence[ArmComparison], arm: str) -> _Speedup:
    """Of an arm: the geometric mean of its speedups weighted by the cases' weights, and where it is what."""
    pairs = [
        (comparison.anchor, verdict)
        for comparison in comparisons
        for cell, verdict in comparison.others
        if cell.arm == arm and verdict
    ]
    logs = [(anchor, math.log(verdict.ratio)) for anchor, verdict in pairs if verdict.ratio is not None]
    weights = [anchor.weight or 1.0 for anchor, _ in logs]
    mean = math.exp(weighted_mean([log for _, log in logs], weights)) if logs else 0.0

    def where(word: str) -> list[str]:
        return [anchor.case for anchor, verdict in pairs if verdict.verdict == word]

    return _Speedup(mean, len(logs), where("faster"), where("slower"))
