"""What a person reads of an experiment with flags: a table per case, and what to set in the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from harness.plan.arms import PLAIN
from harness.plan.contender import contender_name
from harness.report.case_table import ended
from harness.report.text import interval_of, micro, ratio_of, unsupported
from harness.results.effects import changes, effects, regressions, said, same_kernels
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from harness.statistics.paired import Comparison, noise_floor

TOGETHER = {"faster": "more together", "slower": "less together", "same": "independent", "unclear": "unclear"}
"""Of an interaction: what one change brings beside the other, against what it brings alone."""


@dataclass
class Compared:
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


def compared(records: Iterable[Record], run: Run) -> list[Compared]:
    """Of one case, in the order of the record."""
    records = list(records)
    verdicts = {(v.a, v.about): v for v in records if isinstance(v, Verdict)}
    floors = {v.b: v for v in records if isinstance(v, Verdict) and v.about == "A/A"}
    cells: dict[tuple[str, str], list[Cell]] = {}
    for cell in records:
        if isinstance(cell, Cell) and cell.status != "unsupported":
            cells.setdefault((cell.impl, cell.launch), []).append(cell)
    first = next(iter(run.arms))
    found = []
    for group in cells.values():
        if anchor := next((cell for cell in group if cell.arm == first), None):
            others = [(cell, verdicts.get((cell.name, "baseline"))) for cell in group if cell is not anchor]
            found.append(Compared(anchor, others, floors.get(anchor.name)))
    return found


def case_table(records: Sequence[Record], run: Run) -> str:
    """Arms of each implementation, whether they changed what ran, and effects of flags over all arms."""
    cells = [r for r in records if isinstance(r, Cell)]
    done = next(r for r in records if isinstance(r, CaseDone))
    first = cells[0]
    place = f"{first.place}, {first.weight:.1%} of the suite" if first.place != "ad hoc" else first.place
    lines = [f"{first.case}  ({place})"]
    found = compared(records, run)
    rows = [row for one in found for row in _rows(one)]
    if rows:
        headers = ["implementation", "arm", "time", "interval", f"vs {first_arm(run)}", "verdict", "what ran"]
        lines.append(tabulate(rows, headers, disable_numparse=True, maxcolwidths=[*[None] * 6, 48]))
    lines += unsupported(cells)
    for one in found:
        lines += _floor(one)
        lines += _effects(one, run)
    return "\n".join([*lines, ended(done)])


def first_arm(run: Run) -> str:
    """What the others are compared with, in a word."""
    return "plain" if next(iter(run.arms)) == "plain" else "the first"


def _rows(one: Compared) -> Iterator[list[str]]:
    yield [one.name, one.anchor.arm, *_time(one.anchor), "baseline", "", _what(one.anchor)]
    for cell, verdict in one.others:
        if verdict is None:
            yield ["", cell.arm, *_time(cell), "", cell.status if cell.status != "ok" else "", cell.reason]
            continue
        same = same_kernels(one.anchor, cell)
        ran = "the same" if same else changes(one.anchor, cell)
        yield ["", cell.arm, *_time(cell), ratio_of(verdict), said(verdict.verdict, same), ran]


def _time(cell: Cell) -> tuple[str, str]:
    return micro(cell.time_us), interval_of(cell)


def _what(cell: Cell) -> str:
    if cell.status != "ok":
        return f"{cell.status}: {cell.reason}"
    return ", ".join(filter(None, [*cell.kernels[:2], cell.picked, *cell.ran]))


def _floor(one: Compared) -> Iterator[str]:
    if one.floor is not None:
        yield f"noise floor: {one.name} against itself in other workers gave {ratio_of(one.floor)}"


def _effects(one: Compared, run: Run) -> Iterator[str]:
    if len(run.flags) < 2:
        return
    cells = {cell.arm: cell for cell in (one.anchor, *(cell for cell, _ in one.others))}
    settings = {
        arm: {name: variables[name] for name in run.flags}
        for arm, variables in run.arms.items()
        if run.flags.keys() <= variables.keys() and arm in cells
    }
    found = effects(
        cells,
        settings,
        noise_floor(one.floor.comparison) if one.floor else math.inf,
        run.confidence,
        run.margin,
    )
    if not found:
        return
    rows = [
        [
            e.kind,
            e.what,
            _speedup(e.comparison),
            TOGETHER[e.comparison.verdict] if e.kind == "interaction" else e.comparison.verdict,
        ]
        for e in found
    ]
    yield f"effects of the flags on {one.name}, all of them together {run.confidence:.0%} sure:"
    yield tabulate(rows, ["", "change", "speedup", "verdict"], disable_numparse=True)


def _speedup(found: Comparison) -> str:
    return f"{found.ratio:.3f}x ({found.low:.3f}..{found.high:.3f})"


def conclusion(records: Sequence[Record], run: Run) -> str:
    """For each implementation: which arm to take, for which cases, worth how much; of revisions, what
    regressed."""
    by_case: dict[str, list[Record]] = {}
    for record in records:
        by_case.setdefault(getattr(record, "case", ""), []).append(record)
    by_name: dict[str, list[Compared]] = {}
    for of_case in by_case.values():
        for one in compared(of_case, run):
            if one.anchor.time_us is not None:
                by_name.setdefault(one.name, []).append(one)
    if run.trees:
        slower = [f"  {v.a} at {v.case}: {ratio_of(v)}" for v in regressions(records)]
        if not by_name:
            return "nothing was measured, so nothing is known"
        return "\n".join([f"{len(slower)} regressed:", *slower]) if slower else "nothing regressed"
    lines = [f"{name}: {_advice(found, run.margin)}" for name, found in by_name.items()]
    return "\n".join(["recommendation:", *(f"  {line}" for line in lines)]) if lines else ""


def _advice(found: Sequence[Compared], margin: float) -> str:
    """The arm that is faster somewhere and worth most over all cases, by their weights."""
    arms = dict.fromkeys(cell.arm for one in found for cell, _ in one.others)
    worth = {arm: _worth(found, arm) for arm in arms}
    better = {arm: each for arm, each in worth.items() if each.faster and each.mean > 1 + margin}
    if not better:
        lost = [f"{arm} is slower, {each.mean:.2f}x" for arm, each in worth.items() if each.slower]
        kept = f"leave it as it is, no arm brings {margin:.0%} over {found[0].anchor.arm}"
        return "; ".join([kept, *lost])
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
class _Worth:
    mean: float
    cases: int
    faster: list[str]
    slower: list[str]


def _worth(found: Sequence[Compared], arm: str) -> _Worth:
    """Of an arm: the geometric mean of its speedups weighted by the cases' weights, and where it is what."""
    pairs = [
        (one.anchor, verdict) for one in found for cell, verdict in one.others if cell.arm == arm and verdict
    ]
    timed = [(anchor, verdict) for anchor, verdict in pairs if verdict.ratio is not None]
    weights = [anchor.weight or 1.0 for anchor, _ in timed]
    mean = math.exp(statistics.fmean((math.log(v.ratio) for _, v in timed), weights)) if timed else 0.0

    def where(word: str) -> list[str]:
        return [anchor.case for anchor, verdict in pairs if verdict.verdict == word]

    return _Worth(mean, len(timed), where("faster"), where("slower"))
