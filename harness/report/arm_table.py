"""The table of a case under arms (flags, revisions), effects of flags, and the recommendation at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.plan.arms import PLAIN
from harness.plan.contender import contender_name
from harness.report.case_table import heading, measuring_line, unsupported, verdict_ratio
from harness.report.text import microsecond_interval, microseconds, ratio, table
from harness.results.effects import changes, effects, regressions, same_kernels, verdict_text
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from harness.statistics.paired import noise_floor

TOGETHER = {"faster": "more together", "slower": "less together", "same": "independent", "unclear": "unclear"}
"""Of an interaction: what one change brings beside the other, against what it brings alone."""


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


def case_table(records: Sequence[Record], run: Run) -> str:
    """Arms of each implementation, whether they changed what ran, and effects of flags over all arms."""
    cells = [r for r in records if isinstance(r, Cell)]
    done = next(r for r in records if isinstance(r, CaseDone))
    lines = [heading(cells[0])]
    comparisons = arm_comparisons(records, run)
    if rows := [row for comparison in comparisons for row in _rows(comparison)]:
        headers = ["implementation", "arm", "time", "interval", f"vs {first_arm(run)}", "verdict", "what ran"]
        lines.append(table(rows, headers, widths={"what ran": 48}))
    lines += unsupported(cells)
    for comparison in comparisons:
        lines += _floor(comparison)
        lines += _effects(comparison, run)
    return "\n".join([*lines, measuring_line(done)])


def first_arm(run: Run) -> str:
    """What the others are compared with, in a word."""
    return "plain" if next(iter(run.arms)) == "plain" else "the first"


def _rows(comparison: ArmComparison) -> Iterator[list[str]]:
    anchor = comparison.anchor
    yield [comparison.name, anchor.arm, *_time(anchor), "baseline", "", _kernels(anchor)]
    for cell, verdict in comparison.others:
        if verdict is None:
            yield ["", cell.arm, *_time(cell), "", cell.status if cell.status != "ok" else "", cell.reason]
            continue
        same = same_kernels(anchor, cell)
        kernels = "the same" if same else changes(anchor, cell)
        yield [
            "",
            cell.arm,
            *_time(cell),
            verdict_ratio(verdict),
            verdict_text(verdict.verdict, same),
            kernels,
        ]


def _time(cell: Cell) -> tuple[str, str]:
    return microseconds(cell.time_us), microsecond_interval(cell.low_us, cell.high_us)


def _kernels(cell: Cell) -> str:
    """What ran, or why nothing did."""
    if cell.status != "ok":
        return f"{cell.status}: {cell.reason}"
    return ", ".join(filter(None, [*cell.kernels[:2], cell.picked, *cell.ran]))


def _floor(comparison: ArmComparison) -> Iterator[str]:
    if comparison.floor is not None:
        gave = verdict_ratio(comparison.floor)
        yield f"noise floor: {comparison.name} against itself in other workers gave {gave}"


def _effects(comparison: ArmComparison, run: Run) -> Iterator[str]:
    if len(run.flags) < 2:
        return
    cells = {cell.arm: cell for cell in (comparison.anchor, *(cell for cell, _ in comparison.others))}
    settings = {
        arm: {name: variables[name] for name in run.flags}
        for arm, variables in run.arms.items()
        if run.flags.keys() <= variables.keys() and arm in cells
    }
    floor = noise_floor(comparison.floor.comparison) if comparison.floor else math.inf
    rows = [
        [
            e.kind,
            e.what,
            ratio(e.comparison.ratio, e.comparison.low, e.comparison.high),
            TOGETHER[e.comparison.verdict] if e.kind == "interaction" else e.comparison.verdict,
        ]
        for e in effects(cells, settings, floor, run.confidence, run.margin)
    ]
    if rows:
        yield f"effects of the flags on {comparison.name}, all of them together {run.confidence:.0%} sure:"
        yield table(rows, ["", "change", "speedup", "verdict"])


def conclusion(records: Sequence[Record], run: Run) -> str:
    """For each implementation: which arm to take, for which cases, worth how much; of revisions, what
    regressed."""
    by_case: dict[str, list[Record]] = {}
    for record in records:
        by_case.setdefault(getattr(record, "case", ""), []).append(record)
    by_name: dict[str, list[ArmComparison]] = {}
    for of_case in by_case.values():
        for comparison in arm_comparisons(of_case, run):
            if comparison.anchor.time_us is not None:
                by_name.setdefault(comparison.name, []).append(comparison)
    if run.trees:
        slower = [f"  {v.a} at {v.case}: {verdict_ratio(v)}" for v in regressions(records)]
        if not by_name:
            return "nothing was measured, so nothing is known"
        return "\n".join([f"{len(slower)} regressed:", *slower]) if slower else "nothing regressed"
    lines = [f"{name}: {_advice(comparisons, run.margin)}" for name, comparisons in by_name.items()]
    return "\n".join(["recommendation:", *(f"  {line}" for line in lines)]) if lines else ""


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
    mean = math.exp(statistics.fmean((log for _, log in logs), weights)) if logs else 0.0

    def where(word: str) -> list[str]:
        return [anchor.case for anchor, verdict in pairs if verdict.verdict == word]

    return _Speedup(mean, len(logs), where("faster"), where("slower"))
