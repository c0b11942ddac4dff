"""What a run of settings comes to: for each implementation which setting to take, or for revisions what
regressed. Nothing is concluded that the intervals do not prove."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Overall(Comparison):
    """How many times as fast as the first setting another one is, over all cases by their weights. Its
    interval holds whatever the errors of the cases have in common."""

    noise: float  # the factor by which the first setting differs from itself

    @staticmethod
    def of(pairs: Sequence[tuple[Cell, Verdict]]) -> Overall:
        weights = [cell.weight or 1.0 for cell, _ in pairs]

        def mean(values: Sequence[float]) -> float:
            return math.exp(weighted_mean([math.log(value) for value in values], weights))

        verdicts = [verdict for _, verdict in pairs]
        ratio = mean([v.ratio or math.nan for v in verdicts])
        if not all(v.low and v.high and math.isfinite(v.high) and v.noise is not None for v in verdicts):
            return Overall(ratio, 0.0, math.inf, "unclear", 1.0)
        low, high = mean([v.low or 0.0 for v in verdicts]), mean([v.high or 0.0 for v in verdicts])
        return Overall(ratio, low, high, "unclear", mean([1 + (v.noise or 0.0) for v in verdicts]))

    @property
    def least(self) -> float:
        """The least ratio that the interval and the noise leave possible."""
        return self.low / self.noise

    @property
    def most(self) -> float:
        return self.high * self.noise

    @property
    def width(self) -> float:
        return self.high / self.low if self.low else math.inf


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
    overall, verdict = min(((Overall.of([pair]), pair[1]) for pair in pairs), key=lambda of: of[0].least)
    loss = 1 - overall.least
    if loss <= MARGIN:
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
    over = {setting: Overall.of(pairs) for setting, pairs in by_setting.items()}
    faster = {setting: _cases(pairs, "faster") for setting, pairs in by_setting.items()}
    slower = {setting: _cases(pairs, "slower") for setting, pairs in by_setting.items()}
    if better := [name for name, of in over.items() if of.least > 1 and of.ratio > 1 + margin]:
        best = max(better, key=lambda name: over[name].ratio)
        advice = f"{best}: {ratio_text(over[best])}"
        if len(by_setting[best]) > 1:
            advice += f" over {len(by_setting[best])} cases, faster in {len(faster[best])} of them"
        return advice + (f"; but slower for {', '.join(slower[best])}" if slower[best] else "")
    notes = [f"{name} is slower, {ratio_text(over[name])}" for name in over if over[name].most < 1]
    open_ = [of for of in over.values() if of.most > 1 + margin]
    if not over:
        answer = "not known: no other setting has a time"
    elif open_:
        notes += [f"{name} is faster for {', '.join(cases)}" for name, cases in faster.items() if cases]
        answer = f"not known: {_widest(open_)}; {_more(open_, 1 + margin, done)}"
    elif all(of.least >= 1 - margin for of in over.values()):
        answer = f"leave it: all within {100 * margin:.2g} %"
    else:
        answer = f"leave it: no other setting brings {100 * margin:.2g} %"
    return "; ".join([answer, *notes])


def _widest(overall: Sequence[Overall]) -> str:
    """The widest interval, with the noise."""
    widest = max(overall, key=lambda of: of.width)
    if holds_everything(widest.least, widest.most):
        return "too few rounds for an interval"
    ends = uncertain_ratio(widest.ratio, widest.least, widest.most)[1]
    return f"the widest interval is {ends.strip('()')}"


def _more(overall: Sequence[Overall], edge: float, done: Sequence[CaseDone]) -> str:
    """The budget that would tell on which side of an edge each ratio lies, from the rounds that were made: an
    interval shrinks with the square root of their number, once there are MIN_BLOCKS blocks."""
    spent_s = sum(case.measured_s for case in done)
    blocks = min((case.blocks for case in done), default=0)
    if not (spent_s and blocks):
        return "give a longer --budget"
    if blocks < MIN_BLOCKS:
        needed_s, more = spent_s * MIN_BLOCKS / blocks, " or more"
    elif any(holds_everything(of.low, of.high) for of in overall):
        return "give a longer --budget"
    else:
        shrink = max(math.log(of.width) / 2 / max(_aim(of.ratio, edge), 1e-9) for of in overall)
        needed_s, more = spent_s * max(shrink, 1.5) ** 2, ""
    enough = next((text for text, seconds in BUDGETS.items() if seconds >= needed_s), "")
    return f"give --budget {enough}{more}" if enough else "no budget of hours would tell"


def _aim(ratio: float, edge: float) -> float:
    """The half width, in logarithms, with which an interval around the ratio tells it from 1 if the ratio is
    past the edge, else from the edge."""
    past = math.log(ratio) / math.log(edge) > 1
    return abs(math.log(ratio)) if past else abs(math.log(edge / ratio))


def _cases(pairs: Sequence[tuple[Cell, Verdict]], word: str) -> list[str]:
    return [cell.case for cell, verdict in pairs if verdict.verdict == word]
