"""Rows of a measured case as plain data. Tables of text and pages show the same rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.plan.entry import entry_name
from harness.plan.settings import PLAIN
from harness.report.text import grouped
from harness.results.effects import Effect, changes, effects
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from harness.statistics.intervals import CONFIDENCE
from harness.statistics.paired import Comparison, noise_of
from harness.statistics.totals import Times, total_ratio
from kernels.engines import choices

INTERACTION_WORDS = {"faster": "more together", "slower": "less together", "same": "independent",
                     "unclear": "unclear"}  # fmt: skip
"""Verdict on an interaction -> the word: do two changes bring more than the product of what each brings?"""


@dataclass(frozen=True)
class Row:
    cell: Cell
    verdict: Verdict | None
    """The comparison with the baseline or the first setting; None for these two and without a verdict."""
    is_baseline: bool  # whether it is the baseline or has the first setting
    ran: str = ""
    """Which kernels ran, compared with the first setting: `the same`, `other kernels` or `not seen`; empty
    for the first setting, in runs without settings, and without a time."""
    change: str = ""  # which kernels ran instead of which others; for a row without a time the reason

    @property
    def word(self) -> str:
        """The verdict's word; empty where there is none."""
        return self.verdict.verdict if self.verdict else ""


@dataclass(frozen=True)
class CaseResult:
    """The records of a finished case."""

    cells: Sequence[Cell]
    verdicts: Sequence[Verdict]
    done: CaseDone

    @staticmethod
    def of(records: Sequence[Record]) -> CaseResult:
        cells = [record for record in records if isinstance(record, Cell)]
        verdicts = [record for record in records if isinstance(record, Verdict)]
        return CaseResult(cells, verdicts, next(record for record in records if isinstance(record, CaseDone)))

    @property
    def rows(self) -> list[Row]:
        """The rows with a time, the fastest first; then the others by name."""
        against = {v.a: v for v in self.verdicts if v.about == "baseline"}
        ordered = sorted(self.cells, key=lambda cell: (cell.time_us or math.inf, cell.name))
        return [Row(cell, against.get(cell.name), cell.name in self.baselines) for cell in ordered]

    @cached_property
    def timed(self) -> list[Cell]:
        """Cells with a time, the fastest first."""
        return [row.cell for row in self.rows if row.cell.time_us]

    @property
    def baselines(self) -> list[str]:
        """The names of the rows that others are compared with. There is one for each group of entries that
        memory holds at once, and usually it is the same."""
        return [v.b for v in self.verdicts if v.about == "A/A"]

    @property
    def baseline(self) -> str:
        """The implementation of the first of the `baselines`; empty where nothing was compared."""
        if not self.baselines:
            return ""
        return next((cell.impl for cell in self.cells if cell.name == self.baselines[0]), "")

    @property
    def first_against_second(self) -> Verdict | None:
        """The verdict on the fastest row, against the second of its group of entries; None without one."""
        fastest = [cell.name for cell in self.timed[:1]]
        return next((v for v in self.verdicts if v.about == "runner-up" and v.a in fastest), None)

    @cached_property
    def defaults(self) -> dict[str, str]:
        """Engine -> the implementation that it runs by default in this case, under the variables that were
        set for the run. It follows from the sizes, so that old records have it too."""
        cell = self.cells[0]
        sizes = dict(word.split("=", 1) for word in cell.case.split() if "=" in word)
        variables = dict(word.split("=", 1) for word in cell.setting.split(", ") if "=" in word)
        by_engine = choices(cell.op, cell.arch, sizes, variables)
        return {engine: choice.row for engine, choice in by_engine.items() if choice.row}

    def engines_of(self, cell: Cell) -> list[str]:
        """The engines that run the cell's implementation by default."""
        return [engine for engine, row in self.defaults.items() if row == cell.impl]

    def rerun(self, a: Cell, b: Cell) -> tuple[Times, Cell] | None:
        """The times of a rerun and the cell of its baseline, from the A/A pair that shares rounds with both a
        and b. None without such a pair."""
        shared = a.samples.by_round.keys() & b.samples.by_round.keys()
        timed = {cell.name: cell for cell in self.timed}
        for pair in self.verdicts:
            if pair.about == "A/A" and pair.b in timed:
                rerun, baseline = pair.samples.by_round, timed[pair.b]
                if shared & rerun.keys() & baseline.samples.by_round.keys():
                    return rerun, baseline
        return None

    @property
    def noise(self) -> float:
        """The largest noise of its verdicts; infinite without verdicts."""
        return max((math.inf if v.noise is None else v.noise for v in self.verdicts), default=math.inf)

    def comparison(self, a: Cell, b: Cell) -> Verdict | Comparison | None:
        """a against b: the recorded verdict, or else a comparison of the rounds that both have; None if there
        are none. As many comparisons as there are rows hold at CONFIDENCE together."""
        for verdict in self.verdicts:
            if (verdict.a, verdict.b) == (a.name, b.name) and verdict.about != "A/A":
                return verdict
        times_a, times_b = a.samples.by_round, b.samples.by_round
        if not times_a.keys() & times_b.keys():
            return None
        confidence = 1 - (1 - CONFIDENCE) / len(self.timed)
        return total_ratio([(1.0, times_a, times_b)], noise=self.noise, confidence=confidence)

    @property
    def limit_us(self) -> float | None:
        """The microseconds that a call would take at the measured limits of the machine; None where these are
        not known. It follows from each row's time and percentage; the median is taken of these."""
        times = [(cell.time_us, cell.percent_of_ceiling) for cell in self.timed]
        limits = [us * percent / 100 for us, percent in times if us and percent]
        return statistics.median(limits) if limits else None


@dataclass(frozen=True)
class SettingComparison:
    """The settings of one implementation (and launch mode) in a case."""

    name: str  # of the implementation and launch mode, without a setting
    baseline: Row  # the row under the first setting
    others: list[Row]  # those under the other settings
    noise: Verdict | None  # the first setting against itself in other workers; None where it has no time


def setting_comparisons(case: CaseResult, run: Run) -> list[SettingComparison]:
    """A comparison for each implementation that has a cell under the first setting, in recorded order."""
    verdicts = {verdict.a: verdict for verdict in case.verdicts if verdict.about == "baseline"}
    noises = {verdict.b: verdict for verdict in case.verdicts if verdict.about == "A/A"}
    comparisons = []
    for group in grouped(case.cells, lambda cell: (cell.impl, cell.launch)).values():
        baseline = next((cell for cell in group if cell.setting == run.first_setting), None)
        if baseline is None or baseline.status == "unsupported":
            continue
        others = []
        for cell in group:
            if cell is not baseline:
                ran, change = _ran_instead(baseline, cell)
                others.append(Row(cell, verdicts.get(cell.name), is_baseline=False, ran=ran, change=change))
        name = entry_name(baseline.impl, PLAIN, baseline.launch, baseline.platform)
        first_row = Row(baseline, None, is_baseline=True)
        comparisons.append(SettingComparison(name, first_row, others, noises.get(baseline.name)))
    return comparisons


def _ran_instead(baseline: Cell, cell: Cell) -> tuple[str, str]:
    """The `ran` and the `change` of the row of a cell, see Row."""
    if cell.time_us is None:
        return "", cell.reason
    if not all(c.kernels or c.picked or c.ran for c in (baseline, cell)):
        return "not seen", ""
    change = changes(baseline, cell)
    return ("other kernels" if change else "the same"), change


def flag_effects(comparison: SettingComparison, run: Run) -> list[Effect]:
    """The effect of each flag over all settings of the others, and of each two flags together. Empty with one
    flag, or where the settings are not a whole factorial design."""
    if len(run.flags) < 2:
        return []
    cells = {row.cell.setting: row.cell for row in (comparison.baseline, *comparison.others)}
    settings = {}
    for setting, variables in run.settings.items():
        if setting in cells and run.flags.keys() <= variables.keys():
            settings[setting] = {flag: variables[flag] for flag in run.flags}
    noise = noise_of(comparison.noise.comparison) if comparison.noise else math.inf
    return effects(cells, settings, noise, run.confidence, run.margin)


def effect_word(effect: Effect) -> str:
    """The verdict on an effect, in the words that fit its kind."""
    word = effect.comparison.verdict
    return INTERACTION_WORDS[word] if effect.kind == "interaction" else word


def device(run: Run) -> str:
    """The name of the device that a run was measured on."""
    return str(run.provenance.get("machine", {}).get("device", "an unknown device"))


def first_setting_name(run: Run) -> str:
    """`plain` or `the first`: what texts call the setting that the others are compared with."""
    return "plain" if run.first_setting == PLAIN else "the first"
