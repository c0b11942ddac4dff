"""The decision: the best launch of an engine that the measurements support, and what they leave open.

A choice swaps rows in the cases of an op. It is compared with the default over the cases in which the two run
different rows, each counted with its calls, from paired rounds (harness.statistics.totals). The comparisons
of all choices hold together with the stated confidence (Holm).

A launch is a set of flags and variables. It saves what its choices save, op by op. A choice that is `faster`
beyond the noise counts with its estimate. A choice that is not told from the default counts as nothing, or
with its loss, and so does a choice that saves less than a quarter of the margin. The launch that saves most
is taken if it saves at least the margin of the time of a step; of several equal ones, that with the fewest
settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from harness.decide.choices import Launches, LaunchSettings, Pair, compare_rows, launch_text
from harness.decide.measured import Row
from harness.decide.mix import Mix, WeighedCase
from harness.report.text import grouped
from harness.serving.link.kernel_times import AXES
from harness.statistics.intervals import CONFIDENCE
from harness.statistics.paired import Comparison
from harness.statistics.totals import total_ratio
from kernels import engines
from shapes.case import text_of
from shapes.lengths import parse_span

MARGIN = 0.01
"""The share of a step's time that a launch must save: `serving ab` needs 12 pairs of launches to see 1 % of
TPOT (docs/serving-ab.md)."""
LEAST = 0.25  # the part of the margin that a choice must save to be a part of a launch
NO_ROW = "no row does what"  # how the reason begins where the suite has no implementation to measure


@dataclass(frozen=True)
class Choice:
    """A choice, compared with the default."""

    settings: LaunchSettings
    op: str  # empty where the choice is for all ops
    pairs: Sequence[Pair]  # of the cases in which the two run different rows
    missing: Mapping[str, str]  # such cases that could not be compared, with the reason
    comparison: Comparison | None  # over the pairs, above 1 where it is faster; None: there is no pair
    noise: float = 0.0
    confidence: float = CONFIDENCE
    saved_us: float = 0.0  # the time that a mean step saves
    share: float = 0.0  # `saved_us` over the time of a step

    @property
    def is_complete(self) -> bool:
        return bool(self.pairs) and not self.missing

    @property
    def verdict(self) -> str:
        return self.comparison.verdict if self.comparison else ""

    @property
    def is_clear(self) -> bool:
        return self.is_complete and self.verdict == "faster"

    def credit_us(self, margin: float) -> float:
        """The time that a launch counts as saved by it; minus infinity where it could not be compared."""
        if not self.is_complete:
            return -math.inf
        counts = self.is_clear and self.share >= LEAST * margin
        return self.saved_us if counts else min(self.saved_us, 0.0)

    @property
    def share_interval(self) -> tuple[float, float] | None:
        """`share` at both ends of the comparison's interval; None where it cannot be computed."""
        comparison = self.comparison
        if comparison is None or comparison.ratio == 1:
            return None
        if comparison.low <= 0 or not math.isfinite(comparison.high):
            return None
        # `share` is the part of a step that the pairs take by default, times 1 - 1 / ratio.
        part = self.share / (1 - 1 / comparison.ratio)
        return part * (1 - 1 / comparison.low), part * (1 - 1 / comparison.high)


@dataclass(frozen=True)
class Crossover:
    """Two neighbouring sizes at which different rows are fastest."""

    op: str
    fixed: str  # the other sizes, as text
    size: str  # the name of the size
    below: int  # its two values
    above: int
    at: float | None  # the value at which both rows take as long; None: a row was timed at one value only
    faster_below: str
    faster_above: str
    told: bool  # whether each row is clearly faster than the other at its value


@dataclass(frozen=True)
class BestCase:
    """The fastest row that the engine can be made to run for a case."""

    case: WeighedCase
    chosen: Pair  # the default and the row of the decision
    fastest: Pair  # the default and the fastest row
    settings: LaunchSettings  # with which the engine runs the fastest row
    clear: bool  # whether that is clearly faster than the row of the decision
    no_flag: Row | None  # the fastest row that no flag of the engine runs, where it is clearly faster
    no_flag_us: float  # its time


@dataclass(frozen=True)
class Decision:
    """What is to be set, and what the measurements say of it."""

    launches: Launches
    chosen: LaunchSettings  # what is to be set; empty where the default is left
    gain: Choice | None  # of the chosen launch, all ops together; None where the default is left
    choices: Sequence[Choice]  # of each op; of several choices that run the same rows, the first
    cases: Sequence[BestCase]
    crossovers: Sequence[Crossover]
    undecided: Mapping[str, str]  # cases in which the default itself has no time, with the reason
    margin: float  # see MARGIN
    likely: LaunchSettings  # the launch with the least time by the estimates alone, clear or not
    failing: Mapping[str, str]  # launches with which the server fails, with the reason

    @property
    def mix(self) -> Mix:
        return self.launches.mix

    @property
    def compared(self) -> list[Choice]:
        """The choices that could be compared; the choice that saves most comes first."""
        complete = [choice for choice in self.choices if choice.is_complete]
        return sorted(complete, key=lambda choice: -choice.saved_us)

    @property
    def taken(self) -> list[Choice]:
        """The choices that the chosen launch makes."""
        return self.made_by(self.chosen)

    def made_by(self, settings: LaunchSettings) -> list[Choice]:
        """The choices that a launch makes, of those that could be compared."""

        def runs(pair: Pair) -> bool:
            launched = self.launches.pair(pair.case, settings)
            return launched is not None and launched.new is pair.new

        return [choice for choice in self.choices if choice.is_complete and all(map(runs, choice.pairs))]

    @property
    def regret(self) -> float:
        """The time that the chosen launch takes beyond the best rows of all cases, as a share of theirs."""
        chosen_us = sum(best.case.calls * best.chosen.new_us for best in self.cases)
        fastest_us = sum(best.case.calls * best.fastest.new_us for best in self.cases)
        return chosen_us / fastest_us - 1 if fastest_us else 0.0


SwappedRows = frozenset[tuple[object, object]]
"""For each case in which a launch swaps the row: its key, and the new row's id or, untimed, its name."""
Swaps = tuple[str, SwappedRows]
"""An op and what is swapped in its cases. Launches with equal swaps in an op make the same choice for it."""


def decide(launches: Launches, margin: float = MARGIN) -> Decision:
    """Compares all choices of all launches with the default and decides. margin: see MARGIN"""
    by_op = grouped(launches.decidable, lambda case: case.op)
    failing: dict[str, str] = {}
    swaps_of_launches: list[tuple[LaunchSettings, list[Swaps]]] = []  # of the launches that do not fail
    for settings in _merged(launches, by_op):
        if why := launches.fails(settings):
            failing[launch_text(settings)] = why
        else:
            of_ops = [(op, _swapped_rows(launches, cases, settings)) for op, cases in by_op.items()]
            swaps_of_launches.append((settings, [(op, rows) for op, rows in of_ops if rows]))
    choices = _choices(launches, by_op, swaps_of_launches)

    def best(worth_us: Callable[[Choice], float]) -> tuple[float, LaunchSettings]:
        """The launch whose choices are worth most together, and what they are worth."""
        best_us = 0.0
        best_settings: LaunchSettings = {}
        for settings, swaps_of_launch in swaps_of_launches:
            us = sum(worth_us(choices[swaps]) for swaps in swaps_of_launch)
            if (us, -len(settings)) > (best_us, -len(best_settings)):
                best_us, best_settings = us, settings
        return best_us, best_settings

    saved_us, chosen = best(lambda choice: choice.credit_us(margin))
    _, likely = best(lambda choice: choice.saved_us if choice.is_complete else -math.inf)
    gain = None
    if saved_us < margin * launches.step_us:
        chosen = {}
    elif chosen:
        strictest = max(choice.confidence for choice in choices.values())
        gain = _choice(launches, "", launches.decidable, chosen, strictest)
    cases = launches.decidable
    # All comparisons of single cases hold together (Bonferroni).
    case_confidence = 1 - (1 - CONFIDENCE) / max(1, len(cases) * len(launches.candidates))
    undecided = [case for case in launches.mix.cases if not launches.pair(case, {})]
    return Decision(
        launches, chosen, gain, choices=list(choices.values()),
        cases=[_best_case(launches, case, chosen, case_confidence) for case in cases],
        crossovers=list(_crossovers(launches, cases, case_confidence)),
        undecided={case.text: _why(launches, case, {}) for case in undecided},
        margin=margin, likely=likely, failing=failing,
    )  # fmt: skip


def _merged(launches: Launches, by_op: Mapping[str, Sequence[WeighedCase]]) -> list[LaunchSettings]:
    """The candidates and their combinations, with the fewest settings first. A combination has for each op at
    most one candidate, with or without one more that a run of `toggle` measured."""
    merged: list[LaunchSettings] = [{}]
    varied = [settings for settings in launches.candidates if settings in launches.measured.settings]
    for cases in by_op.values():
        of_op = [settings for settings in launches.candidates if _swapped_rows(launches, cases, settings)]
        of_op += [first | second for first, second in product(of_op, varied) if _agree(first, second)]
        for first, second in [*product(merged, of_op)]:
            if _agree(first, second) and first | second not in merged:
                merged.append(first | second)
    return sorted(filter(None, merged), key=len)  # without the default


def _agree(first: LaunchSettings, second: LaunchSettings) -> bool:
    return all(second.get(name, value) == value for name, value in first.items())


def _swapped_rows(launches: Launches, cases: Sequence[WeighedCase], settings: LaunchSettings) -> SwappedRows:
    """Empty where all cases run as by default."""
    differing = [(case, launches.pair(case, settings)) for case in cases if launches.differs(case, settings)]
    return frozenset(
        (case.key, id(pair.new) if pair else launches.row_name(case, settings))
        for case, pair in differing
        if pair is None or not pair.is_unchanged
    )


def _why(launches: Launches, case: WeighedCase, settings: LaunchSettings) -> str:
    """Why a case has no time with these settings, or none beside the default's."""
    rule = launches.rule(case, settings)
    if rule is None:
        return f"what {launches.engine} runs is not known"
    if not rule.row:
        return f"{NO_ROW} {launches.engine} does: {rule.why}"
    for sheet in launches.sheets(case):
        if reason := sheet.untimed.get(rule.row):
            return f"{rule.row} is {reason}"
    rows = [row for sheet in launches.sheets(case) for row in sheet.rows if row.cell.impl == rule.row]
    if not rows:
        return f"{rule.row} was not measured"
    settings_of_rows = ({name: value for name, value in row.variables.items() if value} for row in rows)
    timed = dict.fromkeys(map(launch_text, settings_of_rows))
    if not settings and "the default" not in timed:
        return f"{rule.row} was timed under {' and '.join(timed)} alone: --with takes what is set as given"
    return f"{rule.row} was not measured beside the default in one run, boundary and launch mode"


def _choices(
    launches: Launches, by_op: Mapping[str, Sequence[WeighedCase]],
    swaps_of_launches: Sequence[tuple[LaunchSettings, Sequence[Swaps]]],
) -> dict[Swaps, Choice]:  # fmt: skip
    """All choices, each at a confidence at which all hold together. The error of 1 - CONFIDENCE is shared by
    the choices that are not clear. So each that becomes clear leaves more to the others, which are compared
    anew (Holm, see harness.statistics.multiple)."""
    settings_of: dict[Swaps, LaunchSettings] = {}  # the first, where several launches make a choice
    for settings, swaps_of_launch in swaps_of_launches:
        for swaps in swaps_of_launch:
            settings_of.setdefault(swaps, settings)
    choices: dict[Swaps, Choice] = {}
    unclear, before = [*settings_of], 0
    while unclear and len(unclear) != before:
        before = len(unclear)
        confidence = 1 - (1 - CONFIDENCE) / before
        for op, rows in unclear:
            choices[op, rows] = _choice(launches, op, by_op[op], settings_of[op, rows], confidence)
        unclear = [swaps for swaps in unclear if choices[swaps].verdict not in ("faster", "slower")]
    return choices


def _choice(
    launches: Launches, op: str, cases: Sequence[WeighedCase], settings: LaunchSettings, confidence: float
) -> Choice:
    pairs: list[Pair] = []
    missing: dict[str, str] = {}
    for case in cases:
        if not launches.differs(case, settings):
            continue
        pair = launches.pair(case, settings)
        if pair is None:
            missing[case.text] = _why(launches, case, settings)
        elif not pair.is_unchanged:
            pairs.append(pair)
    if not pairs:
        return Choice(settings, op, pairs, missing, None)
    before = sum(pair.case.calls * pair.us for pair in pairs)
    noise = sum(pair.case.calls * pair.us * pair.sheet.noise for pair in pairs) / before
    series = [pair.series(pair.case.calls) for pair in pairs]
    comparison = total_ratio(series, noise=noise, confidence=confidence)
    saved_us = before * (1 - 1 / comparison.ratio)
    share = saved_us / launches.step_us
    return Choice(settings, op, pairs, missing, comparison, noise, confidence, saved_us, share)


def _best_case(launches: Launches, case: WeighedCase, chosen: LaunchSettings, confidence: float) -> BestCase:
    pair = launches.pair(case, chosen)
    default = launches.pair(case, {})
    assert pair and default
    fastest, settings = pair, chosen
    candidates = launches.candidates
    for other_settings in ({}, *candidates, *(chosen | candidate for candidate in candidates)):
        other = launches.pair(case, other_settings)
        if other and other.new_us < fastest.new_us and not launches.fails(other_settings):
            fastest, settings = other, other_settings
    clear = fastest.new is not pair.new and _leads(fastest, pair, confidence)
    no_flag, no_flag_us = None, fastest.new_us
    of_rules = {rule.row for rule in engines.entries(launches.engine, case.op, launches.measured.arch)}
    for row in default.sheet.rows:
        if row.cell.launch == default.old.cell.launch and row.cell.impl not in of_rules:
            comparison = compare_rows(default.sheet, row, default.old, confidence)
            us = default.us / comparison.ratio
            if comparison.verdict == "faster" and us < no_flag_us:
                no_flag, no_flag_us = row, us
    return BestCase(case, pair, fastest, settings, clear, no_flag, no_flag_us)


def _leads(fast: Pair, slow: Pair, confidence: float) -> bool:
    """Whether a row is clearly faster than another one that was measured in the same rounds."""
    in_same_rounds = fast.sheet is slow.sheet
    return in_same_rounds and compare_rows(fast.sheet, fast.new, slow.new, confidence).verdict == "faster"


class Point(NamedTuple):
    """What the engine can be made to run at a value of a size, by name, the fastest first."""

    value: int
    rows: dict[str, Pair]

    @property
    def fastest(self) -> str:
        return next(iter(self.rows))


def _crossovers(launches: Launches, cases: Sequence[WeighedCase], confidence: float) -> Iterator[Crossover]:
    """Crossovers along each size that grows with the load, between cases whose other sizes are equal."""
    for op, of_op in grouped(cases, lambda case: case.op).items():
        _, growing = AXES[op]
        for size in growing:
            points_by_fixed: dict[str, list[Point]] = {}
            for case in of_op:
                fixed = text_of({name: value for name, value in case.sizes.items() if name != size})
                middle = sum(parse_span(case.sizes[size])) // 2
                points_by_fixed.setdefault(fixed, []).append(Point(middle, _fastest_first(launches, case)))
            for fixed, points in points_by_fixed.items():
                for low, high in pairwise(sorted(points, key=lambda point: point.value)):
                    if low.value < high.value and low.fastest != high.fastest:
                        yield _crossing(op, fixed, size, low, high, confidence)


def _fastest_first(launches: Launches, case: WeighedCase) -> dict[str, Pair]:
    """What the engine can be made to run for a case, by the row's name, or by variables that a run set."""
    rows: dict[str, Pair] = {}
    for settings in ({}, *launches.candidates):
        pair = launches.pair(case, settings)
        if pair and not launches.fails(settings):
            name = launch_text(settings) if pair.new.variables else pair.new.cell.impl
            rows[name] = pair
    return dict(sorted(rows.items(), key=lambda item: item[1].new_us))


def _crossing(op: str, fixed: str, size: str, low: Point, high: Point, confidence: float) -> Crossover:
    """The crossover, with times that are straight lines over the size, both in logarithms."""
    first, last = low.fastest, high.fastest
    at, told = None, False
    if last in low.rows and first in high.rows:
        lead_at_low = math.log(low.rows[last].new_us / low.rows[first].new_us)
        lead_at_high = math.log(high.rows[first].new_us / high.rows[last].new_us)
        both = lead_at_low + lead_at_high
        part = lead_at_low / both if both else 0.5
        at = math.exp(math.log(low.value) + part * math.log(high.value / low.value))
        is_first_faster = _leads(low.rows[first], low.rows[last], confidence)
        told = is_first_faster and _leads(high.rows[last], high.rows[first], confidence)
    return Crossover(op, fixed, size, low.value, high.value, at, first, last, told)
