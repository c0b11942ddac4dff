"""What a run of settings comes to: for each implementation which setting to take, or for revisions what
regressed. Nothing is concluded that the intervals do not prove."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding

from harness.plan.toggle import MARGIN
from harness.report.rows import CaseResult, Row, SettingComparison, setting_comparisons
from harness.report.text import counted, grouped, ratio_text, together, uncertain_ratio
from harness.results.effects import lost, regressions
from harness.results.schema import CaseDone, Run, Samples
from harness.statistics.paired import Comparison, noise_of
from harness.statistics.totals import Times, total_ratio

Pairs = Sequence[tuple[SettingComparison, Row]]
"""Of each case the settings of an implementation, and the row of one of them."""


def conclusion(cases: Sequence[CaseResult], run: Run) -> RenderableType:
    title, lines = conclusion_lines(cases, run)
    return Group(*filter(None, [title]), *(Padding(line, (0, 0, 0, 2)) for line in lines))


def conclusion_lines(cases: Sequence[CaseResult], run: Run) -> tuple[str, list[str]]:
    """A title, and a line for each implementation or regression."""
    comparisons = [comparison for case in cases for comparison in setting_comparisons(case, run)]
    timed = [comparison for comparison in comparisons if comparison.baseline.cell.time_us is not None]
    done = [case.done for case in cases]
    left = len(run.cases) - len(cases)
    unmeasured = f"; {counted(left)} not measured" if left > 0 else ""
    if run.trees:
        if not timed:
            return "nothing was measured, so nothing is known", []
        lines = [f"{v.a} at {v.case}: {ratio_text(v)}" for case in cases for v in regressions(case.verdicts)]
        first = next(iter(run.settings))
        without = [cell for case in cases for cell in lost(case.cells, first)]
        lines += [f"{cell.name} at {cell.case}: {cell.status}" for cell in without]
        said = f"{len(lines)} regressed" if lines else _no_regression(timed, done)
        return said + unmeasured + (":" if lines else ""), lines
    by_name = grouped(timed, lambda comparison: comparison.name)
    lines = [f"{name}: {_advice(of, run, done)}" for name, of in by_name.items()]
    return (f"recommendation{unmeasured}:" if lines else "", lines)


def _no_regression(comparisons: Sequence[SettingComparison], done: Sequence[CaseDone]) -> str:
    """What is known where no verdict is `slower`."""
    rows = [(of, row) for of in comparisons for row in of.others if _has_ratio(row)]
    found = [(_overall([pair], MARGIN), pair[1].cell) for pair in rows]
    if not found:
        return "not known whether anything regressed: no row has a time in both revisions"
    unknown = [(of, cell) for of, cell in found if of.verdict != "same" and of.low < 1 - MARGIN]
    least, cell = min(unknown or found, key=lambda of: of[0].low)
    if not unknown:
        loss = 1 - least.low
        return "nothing regressed" + (f": no row lost more than {_percent(loss)}" if loss > 0 else "")
    worst = f"the least certain is {cell.name} at {cell.case}: {ratio_text(least)}"
    return f"not known whether anything regressed: {worst}; {_more(done)}"


def _advice(comparisons: Sequence[SettingComparison], run: Run, done: Sequence[CaseDone]) -> str:
    """The setting that brings most for all cases together, if that is known; or that none brings anything;
    or that this is not known. A setting that fails in a case is not recommended."""
    pairs = [(of, row) for of in comparisons for row in of.others]
    by_setting = grouped(pairs, lambda pair: pair[1].cell.setting)
    whole, several = counted(len(comparisons)), len(comparisons) > 1
    how = f" {together(of.baseline.cell.weight for of in comparisons)}" if several else ""
    over, failed = {}, []
    for name, of_setting in by_setting.items():
        if lacking := [row.cell for _, row in of_setting if not _has_ratio(row)]:
            words = sorted({"not compared" if cell.time_us else cell.status for cell in lacking})
            part = f" in {len(lacking)} of {whole}" if several else ""
            failed.append(f"{name}: {' or '.join(words)}{part}")
        else:
            over[name] = _overall(of_setting, run.margin)
    enough = 1 + run.margin
    if better := [name for name, of in over.items() if of.verdict == "faster" and of.ratio > enough]:
        best = max(better, key=lambda name: over[name].ratio)
        faster, slower = (_cases(by_setting[best], word) for word in ("faster", "slower"))
        told = [f"{best}: {ratio_text(over[best])}{how}"]
        told[0] += f", faster in {len(faster)} of {whole}" if several else ""
        return "; ".join([*told, *(f"but slower for {', '.join(slower)}" for _ in slower[:1]), *failed])
    judged = {name: of for name, of in over.items() if of.verdict in ("faster", "slower")}
    notes = [f"{name} is {of.verdict}, {ratio_text(of)}{how}" for name, of in judged.items()]
    helped = {name: ", ".join(_cases(by_setting[name], "faster")) for name in over if several}
    notes += [*(f"{name} is faster for {cases}" for name, cases in helped.items() if cases), *failed]
    unknown = [of for of in over.values() if of.verdict == "unclear" and of.high > enough]
    reach = max((max(of.high - 1, 1 - of.low) for of in over.values()), default=0.0)
    if not over:
        answer = f"leave it: no other setting has a time{' in every case' if several else ''}"
    elif unknown:
        widest = max(unknown, key=lambda of: of.high / of.low if of.low else math.inf)
        ends = uncertain_ratio(widest.ratio, widest.low, widest.high)[1].strip("()")
        why = f"the widest interval is {ends}" if ends else "too few rounds for an interval"
        answer = f"not known: {why}; {_more(done)}"
    elif not judged and (reach <= run.margin or all(of.verdict == "same" for of in over.values())):
        answer = f"leave it: {', '.join(over) if failed else 'all'} within {_percent(max(reach, run.margin))}"
    else:
        clearly = "clearly " if any(of.high > enough for of in over.values()) else ""
        answer = f"leave it: no other setting {clearly}brings {_percent(run.margin)}"
    return "; ".join([answer, *notes])


def _overall(pairs: Pairs, margin: float) -> Comparison:
    """How many times as fast as the first setting another one is for all cases together. The interval has
    the noise in it. `same` is said only where the noise is within the margin."""
    verdicts = [row.verdict for _, row in pairs if row.verdict]
    again = [(of, of.noise.samples) for of, _ in pairs if of.noise and of.noise.samples.seconds]
    noise = max(math.inf if v.noise is None else v.noise for v in verdicts)
    if len(again) == len(pairs) > 1:
        noise = noise_of(total_ratio(_times(again)))
    times = _times((of, row.cell.samples) for of, row in pairs)
    of_all = total_ratio(times, noise=noise, margin=margin, confidence=max(v.confidence for v in verdicts))
    word = "unclear" if of_all.verdict == "same" and noise > margin else of_all.verdict
    return Comparison(of_all.ratio, of_all.low / (1 + noise), of_all.high * (1 + noise), word)


def _times(pairs: Iterable[tuple[SettingComparison, Samples]]) -> list[tuple[float, Times, Times]]:
    cells = ((of.baseline.cell, samples) for of, samples in pairs)
    return [(cell.weight, samples.by_round, cell.samples.by_round) for cell, samples in cells]


def _more(done: Sequence[CaseDone]) -> str:
    ended = any("budget" in case.stopped for case in done)
    return "give a longer --budget" if ended else "a quieter machine may tell, a longer --budget would not"


def _percent(share: float) -> str:
    """Rounded up to a tenth."""
    return f"{math.ceil(round(1000 * share, 6)) / 10:g} %"


def _has_ratio(row: Row) -> bool:
    return row.verdict is not None and row.verdict.ratio is not None


def _cases(pairs: Pairs, word: str) -> list[str]:
    return [row.cell.case for _, row in pairs if row.word == word]
