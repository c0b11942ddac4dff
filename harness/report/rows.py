"""Rows of a measured case as plain data, made once: tables of text and pages show the same rows."""

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

TOGETHER = {"faster": "more together", "slower": "less together", "same": "independent", "unclear": "unclear"}
"""Verdicts on an interaction: what one change brings beside the other, compared with what it brings alone."""


@dataclass(frozen=True)
class Row:
    cell: Cell
    verdict: Verdict | None
    """The comparison with the baseline or the first setting; None for these, and where there is none."""
    is_baseline: bool
    ran: str = ""
    """`the same` or `other kernels`, compared with the first setting; empty for that, and without a time."""
    change: str = ""  # which kernels ran in place of which; without a time the reason for that

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
        return CaseResult(
            [record for record in records if isinstance(record, Cell)],
            [record for record in records if isinstance(record, Verdict)],
            next(record for record in records if isinstance(record, CaseDone)),
        )

    @property
    def rows(self) -> list[Row]:
        """Rows with a time first, the fastest first; then the others by name."""
        against = {v.a: v for v in self.verdicts if v.about == "baseline"}
        ordered = sorted(self.cells, key=lambda cell: (cell.time_us or math.inf, cell.name))
        return [Row(cell, against.get(cell.name), cell.name in self.baselines) for cell in ordered]

    @cached_property
    def timed(self) -> list[Cell]:
        """Cells with a time, the fastest first."""
        return [row.cell for row in self.rows if row.cell.time_us]

    @property
    def baselines(self) -> list[str]:
        """Names of the rows that others are compared with. Where memory splits the entries of a case into
        groups, each group has its own comparison with the baseline."""
        return [v.b for v in self.verdicts if v.about == "A/A"]

    @property
    def baseline(self) -> str:
        """The implementation of the first of these; empty where nothing was compared."""
        return next((cell.impl for cell in self.cells if cell.name in self.baselines[:1]), "")

    @property
    def runner_up(self) -> Verdict | None:
        """The fastest row against the second, in its group of entries."""
        about_second = (v for v in self.verdicts if v.about == "runner-up")
        return next((v for v in about_second if self.timed and v.a == self.timed[0].name), None)

    @cached_property
    def defaults(self) -> dict[str, str]:
        """Engine -> the implementation that it runs by default in this case, under the variables that were
        set for the run. It follows from the sizes, so that old records have it too."""
        cell = self.cells[0]
        sizes = dict(word.split("=", 1) for word in cell.case.split() if "=" in word)
        given = dict(part.split("=", 1) for part in cell.setting.split(", ") if "=" in part)
        found = choices(cell.op, cell.arch, sizes, given)
        return {engine: choice.row for engine, choice in found.items() if choice.row}

    def engines_of(self, cell: Cell) -> list[str]:
        return [engine for engine, row in self.defaults.items() if row == cell.impl]

    def again(self, a: Cell, b: Cell) -> tuple[Times, Cell] | None:
        """The times of the baseline's rerun, and the baseline, of the A/A pair in the group of entries that a
        and b were measured in; None where there are none."""
        shared = a.samples.by_round.keys() & b.samples.by_round.keys()
        for pair in (v for v in self.verdicts if v.about == "A/A"):
            baseline = next((cell for cell in self.timed if cell.name == pair.b), None)
            if baseline and shared & pair.samples.by_round.keys() & baseline.samples.by_round.keys():
                return pair.samples.by_round, baseline
        return None

    @property
    def noise(self) -> float:
        """The largest that its verdicts state."""
        return max((math.inf if v.noise is None else v.noise for v in self.verdicts), default=math.inf)

    def compared(self, a: Cell, b: Cell) -> Verdict | Comparison | None:
        """a against b: the recorded verdict, or what the rounds that both have say at an equal share of the
        error of as many comparisons as there are rows. None where they share no round."""
        for known in self.verdicts:
            if (known.a, known.b) == (a.name, b.name) and known.about != "A/A":
                return known
        times = a.samples.by_round, b.samples.by_round
        if not times[0].keys() & times[1].keys():
            return None
        share = 1 - (1 - CONFIDENCE) / len(self.timed)
        return total_ratio([(1.0, *times)], noise=self.noise, confidence=share)

    @property
    def limit_us(self) -> float | None:
        """The microseconds of a call at the measured limits of the machine; None where there are none."""
        limits = [
            cell.time_us * cell.percent_of_ceiling / 100
            for cell in self.timed
            if cell.time_us and cell.percent_of_ceiling
        ]
        return statistics.median(limits) if limits else None


@dataclass(frozen=True)
class SettingComparison:
    """The settings of one implementation (and launch mode) in a case."""

    name: str  # the name of the implementation, without a setting
    baseline: Row  # the first setting
    others: list[Row]
    noise: Verdict | None  # the first setting against itself in other workers; None where it has no time


def setting_comparisons(case: CaseResult, run: Run) -> list[SettingComparison]:
    """A comparison for each implementation that has a cell under the first setting, in recorded order."""
    verdicts = {verdict.a: verdict for verdict in case.verdicts if verdict.about == "baseline"}
    noises = {verdict.b: verdict for verdict in case.verdicts if verdict.about == "A/A"}
    first = next(iter(run.settings))
    comparisons = []
    for group in grouped(case.cells, lambda cell: (cell.impl, cell.launch)).values():
        baseline = next((cell for cell in group if cell.setting == first), None)
        if baseline is None or baseline.status == "unsupported":
            continue
        others = []
        for cell in group:
            ran, change = "", cell.reason
            if cell.time_us is not None:
                seen = all(each.kernels or each.picked or each.ran for each in (baseline, cell))
                change = changes(baseline, cell) if seen else ""
                ran = "other kernels" if change else "the same" if seen else "not seen"
            if cell is not baseline:
                others.append(Row(cell, verdicts.get(cell.name), is_baseline=False, ran=ran, change=change))
        name = entry_name(baseline.impl, PLAIN, baseline.launch, baseline.platform)
        first_row = Row(baseline, None, is_baseline=True)
        comparisons.append(SettingComparison(name, first_row, others, noises.get(baseline.name)))
    return comparisons


def flag_effects(comparison: SettingComparison, run: Run) -> list[Effect]:
    """The effect of each flag over all settings of the others, and of each two flags together. Empty with one
    flag, or where the settings are not a whole factorial design."""
    if len(run.flags) < 2:
        return []
    cells = {row.cell.setting: row.cell for row in (comparison.baseline, *comparison.others)}
    settings = {
        setting: {name: variables[name] for name in run.flags}
        for setting, variables in run.settings.items()
        if run.flags.keys() <= variables.keys() and setting in cells
    }
    noise = noise_of(comparison.noise.comparison) if comparison.noise else math.inf
    return effects(cells, settings, noise, run.confidence, run.margin)


def effect_word(effect: Effect) -> str:
    """The verdict on an effect, in the words that fit its kind."""
    word = effect.comparison.verdict
    return TOGETHER[word] if effect.kind == "interaction" else word


def device(run: Run) -> str:
    return str(run.provenance.get("machine", {}).get("device", "an unknown device"))


def first_setting(run: Run) -> str:
    """How to call the setting that the others are compared with."""
    return "plain" if next(iter(run.settings)) == "plain" else "the first"
