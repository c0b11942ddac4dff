"""What a run of settings comes to: for each implementation which setting to take, or for revisions what
regressed. Nothing is concluded that the intervals do not prove."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding

from harness.plan.toggle import MARGIN
from harness.report.rows import SettingComparison, setting_comparisons
from harness.report.text import grouped, holds_everything, ratio_text, uncertain_ratio
from harness.results.effects import regressions
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from harness.statistics.intervals import MIN_BLOCKS, weighted_mean
from harness.statistics.paired import Comparison

BUDGETS = {"1m": 60, "2m": 120, "5m": 300, "10m": 600, "20m": 1200, "30m": 1800, "1h": 3600, "2h": 7200}
"""The budgets that are advised, with their seconds."""


Pairs = Sequence[tuple[Cell, Verdict]]
"""Of each case a cell, which has its weight, and the verdict of a setting against the first one."""


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
    done = [record for record in records if isinstance(record, CaseDone)]
    if run.trees:
        if not timed:
            return "nothing was measured, so nothing is known", []
        slower = [f"{v.a} at {v.case}: {ratio_text(v)}" for v in regressions(records)]
        return (f"{len(slower)} regressed:", slower) if slower else (_no_regression(timed, done), [])
    by_name = grouped(timed, lambda comparison: comparison.name)
    lines = [f"{name}: {_advice(of, run.margin, done)}" for name, of in by_name.items()]
    return ("recommendation:" if lines else "", lines)


def _no_regression(comparisons: Sequence[SettingComparison], done: Sequence[CaseDone]) -> str:
    """What is known where no verdict is `slower`."""
    pairs = [(c.baseline.cell, row.verdict) for c in comparisons for row in c.others if row.verdict]
    if not pairs:
        return "not known whether anything regressed: no row has a time in both revisions"
    overall, verdict = min(((_overall([pair]), pair[1]) for pair in pairs), key=lambda of: of[0].low)
    if (loss := 1 - overall.low) <= MARGIN:
        return "nothing regressed" + (f": no row lost more than {loss:.1%}" if loss > 0 else "")
    worst = f"the least certain is {verdict.a} at {verdict.case}: {ratio_text(verdict)}"
    return f"not known whether anything regressed: {worst}; {_more([overall], 1 - MARGIN, done)}"


def _advice(comparisons: Sequence[SettingComparison], margin: float, done: Sequence[CaseDone]) -> str:
    """The setting that brings most over all cases, by their weights, if that is known; or that none brings
    anything; or that this is not known, and what would tell."""
    by_setting: dict[str, list[tuple[Cell, Verdict]]] = {}
    for comparison in comparisons:
        for row in comparison.others:
            if row.verdict and row.verdict.ratio is not None:
                by_setting.setdefault(row.cell.setting, []).append((comparison.baseline.cell, row.verdict))
    over = {setting: _overall(pairs) for setting, pairs in by_setting.items()}
    faster = {setting: _cases(pairs, "faster") for setting, pairs in by_setting.items()}
    if better := [name for name, of in over.items() if of.low > 1 and of.ratio > 1 + margin]:
        best = max(better, key=lambda name: over[name].ratio)
        advice = f"{best}: {ratio_text(over[best])}"
        if len(by_setting[best]) > 1:
            advice += f" over {len(by_setting[best])} cases, faster in {len(faster[best])} of them"
        slower = _cases(by_setting[best], "slower")
        return advice + (f"; but slower for {', '.join(slower)}" if slower else "")
    notes = [f"{name} is slower, {ratio_text(of)}" for name, of in over.items() if of.high < 1]
    undecided = [of for of in over.values() if of.high > 1 + margin]
    if not over:
        answer = "not known: no other setting has a time"
    elif undecided:
        notes += [f"{name} is faster for {', '.join(cases)}" for name, cases in faster.items() if cases]
        widest = max(undecided, key=_width)
        ends = uncertain_ratio(widest.ratio, widest.low, widest.high)[1].strip("()")
        why = f"the widest interval is {ends}" if ends else "too few rounds for an interval"
        answer = f"not known: {why}; {_more(undecided, 1 + margin, done)}"
    elif all(of.low >= 1 - margin for of in over.values()):
        answer = f"leave it: all within {100 * margin:.2g} %"
    else:
        answer = f"leave it: no other setting brings {100 * margin:.2g} %"
    return "; ".join([answer, *notes])


def _overall(pairs: Pairs) -> Comparison:
    """How many times as fast as the first setting another one is, over all cases by their weights. The
    interval has the noise in it, and holds whatever the errors of the cases have in common."""
    weights, verdicts = [cell.weight or 1.0 for cell, _ in pairs], [verdict for _, verdict in pairs]

    def mean(values: Iterable[float]) -> float:
        return math.exp(weighted_mean([math.log(value) for value in values], weights))

    ratio = mean(v.ratio or math.nan for v in verdicts)
    known = [(v.low, v.high, 1 + v.noise) for v in verdicts if v.low and v.high and v.noise is not None]
    if len(known) < len(pairs):
        return Comparison(ratio, 0.0, math.inf, "unclear")
    low, high = mean(low / noise for low, _, noise in known), mean(high * noise for _, high, noise in known)
    return Comparison(ratio, low, high, "unclear")


def _width(of: Comparison) -> float:
    return of.high / of.low if of.low else math.inf


def _more(several: Sequence[Comparison], edge: float, done: Sequence[CaseDone]) -> str:
    """The budget that would tell on which side of an edge each ratio lies, from the rounds that were made: an
    interval shrinks with the square root of their number, once there are MIN_BLOCKS blocks."""
    spent_s = sum(case.measured_s for case in done)
    blocks = min((case.blocks for case in done), default=0)
    if blocks and blocks < MIN_BLOCKS:
        needed_s, more = spent_s * MIN_BLOCKS / blocks, " or more"
    elif blocks and not any(holds_everything(of.low, of.high) for of in several):
        shrink = max(math.log(_width(of)) / 2 / max(_aim(of.ratio, edge), 1e-9) for of in several)
        needed_s, more = spent_s * max(shrink, 1.5) ** 2, ""
    else:
        return "give a longer --budget"
    enough = next((text for text, seconds in BUDGETS.items() if seconds >= needed_s), "")
    return f"give --budget {enough}{more}" if enough else "no budget of hours would tell"


def _aim(ratio: float, edge: float) -> float:
    """The half width, in logarithms, with which an interval around the ratio tells it from 1 if the ratio is
    past the edge, else from the edge."""
    past = math.log(ratio) / math.log(edge) > 1
    return abs(math.log(ratio)) if past else abs(math.log(edge / ratio))


def _cases(pairs: Pairs, word: str) -> list[str]:
    return [cell.case for cell, verdict in pairs if verdict.verdict == word]
