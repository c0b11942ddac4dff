"""The conclusion of a run of settings: which setting to take for each implementation, or, where the settings
are revisions, what regressed. Nothing is concluded that the intervals do not prove."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding

from harness.plan.toggle import MARGIN
from harness.report.rows import CaseResult, Row, SettingComparison, setting_comparisons
from harness.report.text import counted, grouped, how_summed, ratio_and_interval, ratio_text
from harness.results.effects import lost, regressions
from harness.results.schema import CaseDone, Run, Samples
from harness.statistics.paired import Comparison, noise_of
from harness.statistics.totals import Times, total_ratio

Pairs = Sequence[tuple[SettingComparison, Row]]
"""For several cases the comparison of an implementation's settings, and the row of one of these settings."""


def conclusion(cases: Sequence[CaseResult], run: Run) -> RenderableType:
    title, lines = conclusion_lines(cases, run)
    indented = [Padding(line, (0, 0, 0, 2)) for line in lines]
    return Group(title, *indented) if title else Group(*indented)


def conclusion_lines(cases: Sequence[CaseResult], run: Run) -> tuple[str, list[str]]:
    """A title, and a line for each implementation or regression."""
    comparisons = [comparison for case in cases for comparison in setting_comparisons(case, run)]
    timed = [comparison for comparison in comparisons if comparison.baseline.cell.time_us is not None]
    done = [case.done for case in cases]
    missing = len(run.cases) - len(cases)
    unmeasured = f"; {counted(missing)} not measured" if missing > 0 else ""
    if run.trees:  # the settings are revisions
        if not timed:
            return "nothing was measured, so nothing is known", []
        lines = [f"{v.a} at {v.case}: {ratio_text(v)}" for case in cases for v in regressions(case.verdicts)]
        without_time = [cell for case in cases for cell in lost(case.cells, run.first_setting)]
        lines += [f"{cell.name} at {cell.case}: {cell.status}" for cell in without_time]
        if lines:
            return f"{len(lines)} regressed{unmeasured}:", lines
        return _without_regression(timed, done) + unmeasured, []
    by_name = grouped(timed, lambda comparison: comparison.name)
    lines = [f"{name}: {_advice(of_name, run, done)}" for name, of_name in by_name.items()]
    return (f"recommendation{unmeasured}:" if lines else "", lines)


def _without_regression(comparisons: Sequence[SettingComparison], done: Sequence[CaseDone]) -> str:
    """What is known of regressions where no verdict is `slower`."""
    pairs = [(comparison, row) for comparison in comparisons for row in comparison.others if _has_ratio(row)]
    ratios = [(_over_cases([(comparison, row)], MARGIN), row.cell) for comparison, row in pairs]
    if not ratios:
        return "not known whether anything regressed: no row has a time in both revisions"
    unknown = [(ratio, cell) for ratio, cell in ratios if ratio.verdict != "same" and ratio.low < 1 - MARGIN]
    if unknown:
        lowest, cell = min(unknown, key=lambda ratio_and_cell: ratio_and_cell[0].low)
        least_certain = f"the least certain is {cell.name} at {cell.case}: {ratio_text(lowest)}"
        return f"not known whether anything regressed: {least_certain}; {_what_would_tell(done)}"
    loss = 1 - min(ratio.low for ratio, _ in ratios)
    return "nothing regressed" + (f": no row lost more than {_percent(loss)}" if loss > 0 else "")


def _advice(comparisons: Sequence[SettingComparison], run: Run, done: Sequence[CaseDone]) -> str:
    """The setting that brings most for all cases together, if that is known; or that none brings anything;
    or that this is not known. The comparisons are of one implementation, one for each case."""
    pairs = [(comparison, row) for comparison in comparisons for row in comparison.others]
    by_setting = grouped(pairs, lambda pair: pair[1].cell.setting)
    several = len(comparisons) > 1
    all_cases = counted(len(comparisons))
    weights = [comparison.baseline.cell.weight for comparison in comparisons]
    summed = f" {how_summed(weights)}" if several else ""

    # Only settings with a ratio in each case can be recommended. There is a sentence on each of the others.
    ratios, failed = {}, []
    for setting, of_setting in by_setting.items():
        without_ratio = [row.cell for _, row in of_setting if not _has_ratio(row)]
        if not without_ratio:
            ratios[setting] = _over_cases(of_setting, run.margin)
            continue
        reasons = sorted({"not compared" if cell.time_us else cell.status for cell in without_ratio})
        where = f" in {len(without_ratio)} of {all_cases}" if several else ""
        failed.append(f"{setting}: {' or '.join(reasons)}{where}")

    # The fastest is recommended if it is known to bring more than the margin.
    enough = 1 + run.margin
    better = [name for name, ratio in ratios.items() if ratio.verdict == "faster" and ratio.ratio > enough]
    if better:
        best = max(better, key=lambda name: ratios[name].ratio)
        advice = f"{best}: {ratio_text(ratios[best])}{summed}"
        if several:
            advice += f", faster in {len(_cases_where('faster', by_setting[best]))} of {all_cases}"
        if slower := _cases_where("slower", by_setting[best]):
            advice += f"; but slower for {', '.join(slower)}"
        return "; ".join([advice, *failed])

    # None is recommended: why, what is known of each all the same, and which settings failed.
    judged = {name: ratio for name, ratio in ratios.items() if ratio.verdict in ("faster", "slower")}
    notes = [f"{name} is {ratio.verdict}, {ratio_text(ratio)}{summed}" for name, ratio in judged.items()]
    for name in ratios:
        faster = _cases_where("faster", by_setting[name])
        if several and faster:
            notes.append(f"{name} is faster for {', '.join(faster)}")
    if ratios:
        advice = _no_advice(ratios, run.margin, bool(failed), done)
    else:
        advice = f"leave it: no other setting has a time{' in every case' if several else ''}"
    return "; ".join([advice, *notes, *failed])


def _no_advice(
    ratios: dict[str, Comparison], margin: float, some_failed: bool, done: Sequence[CaseDone]
) -> str:
    """Why no setting is recommended: the intervals are too wide, or all settings are within the margin, or
    none is known to bring more than the margin. There is a ratio for each setting, over all cases."""
    enough = 1 + margin
    unknown = [ratio for ratio in ratios.values() if ratio.verdict == "unclear" and ratio.high > enough]
    if unknown:
        widest = max(unknown, key=lambda ratio: ratio.high / ratio.low if ratio.low else math.inf)
        _, interval = ratio_and_interval(widest)
        reason = "too few rounds for an interval"
        if interval:
            reason = f"the widest interval is {interval.strip('()')}"
        return f"not known: {reason}; {_what_would_tell(done)}"
    largest_effect = max(max(ratio.high - 1, 1 - ratio.low) for ratio in ratios.values())  # that may be
    verdicts = {ratio.verdict for ratio in ratios.values()}
    if verdicts == {"same"} or (verdicts <= {"same", "unclear"} and largest_effect <= margin):
        settings = ", ".join(ratios) if some_failed else "all"
        return f"leave it: {settings} within {_percent(max(largest_effect, margin))}"
    clearly = "clearly " if any(ratio.high > enough for ratio in ratios.values()) else ""
    return f"leave it: no other setting {clearly}brings {_percent(margin)}"


def _over_cases(pairs: Pairs, margin: float) -> Comparison:
    """The speedup of another setting over the first one for all cases together; its rows have verdicts. The
    interval is widened by the noise, and no verdict is `same` where the noise exceeds the margin.

    The noise is that of the A/A pairs of all cases together. For one case, or where a case has no times of
    its pair, it is the largest noise of the verdicts."""
    verdicts = [row.verdict for _, row in pairs if row.verdict]
    reruns = [(c, c.noise.samples) for c, _ in pairs if c.noise and c.noise.samples.seconds]
    if len(reruns) == len(pairs) > 1:
        noise = noise_of(total_ratio(_times(reruns)))
    else:
        noise = max(math.inf if verdict.noise is None else verdict.noise for verdict in verdicts)
    confidence = max(verdict.confidence for verdict in verdicts)
    times = _times((comparison, row.cell.samples) for comparison, row in pairs)
    ratio = total_ratio(times, noise=noise, margin=margin, confidence=confidence)
    verdict = "unclear" if ratio.verdict == "same" and noise > margin else ratio.verdict
    return Comparison(ratio.ratio, ratio.low / (1 + noise), ratio.high * (1 + noise), verdict)


def _times(pairs: Iterable[tuple[SettingComparison, Samples]]) -> list[tuple[float, Times, Times]]:
    """For each case its weight, the times in the samples, and those under the first setting."""
    cells = ((comparison.baseline.cell, samples) for comparison, samples in pairs)
    return [(cell.weight, samples.by_round, cell.samples.by_round) for cell, samples in cells]


def _what_would_tell(done: Sequence[CaseDone]) -> str:
    if any("budget" in case.stopped for case in done):
        return "give a longer --budget"
    return "a quieter machine may tell, a longer --budget would not"


def _percent(share: float) -> str:
    """Rounded up to a tenth of a percent; `round` first, so that 2 % of binary digits stay 2 %."""
    return f"{math.ceil(round(1000 * share, 6)) / 10:g} %"


def _has_ratio(row: Row) -> bool:
    return row.verdict is not None and row.verdict.ratio is not None


def _cases_where(verdict: str, pairs: Pairs) -> list[str]:
    return [row.cell.case for _, row in pairs if row.word == verdict]
