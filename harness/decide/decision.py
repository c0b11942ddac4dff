"""The decision: the best launch of an engine that the measurements support, and what they leave open.

A choice swaps rows in the cases of an op. It is compared with the default over the cases in which the two run
something else, each counted with its calls, from paired rounds (harness.statistics.totals). The comparisons
of all choices hold together with the stated confidence (Holm).

A launch is a set of flags and variables. It saves what its choices save, op by op. A choice that is `faster`
beyond the noise counts with its estimate; one that is not told from the default counts as nothing, or with
its loss, and so does one that saves less than a quarter of the margin. The launch that saves most is taken,
of equal ones that with the fewest settings, if it saves at least the margin of the time of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.decide.choices import Launches, Pair, Setting, against, launch_text
from harness.decide.measured import Row
from harness.decide.mix import Mix, Weighed
from harness.report.text import grouped
from harness.serving.link.kernel_times import AXES
from harness.statistics.intervals import CONFIDENCE
from harness.statistics.paired import Comparison
from harness.statistics.totals import total_ratio
from kernels import engines
from shapes.case import text_of
from shapes.lengths import parse_span

MARGIN = 0.01
"""The share of the time of a step that a launch must save. `serving ab` needs 12 pairs of launches to see 1 %
of TPOT (docs/serving-ab.md)."""
LEAST = 0.25
"""The part of the margin that a choice must save to be a part of a launch."""
NO_ROW = "no row does what"
"""How the reason begins where the suite has no implementation to measure."""


@dataclass(frozen=True)
class Compared:
    """A choice against the default.

    op:         empty where it is of all ops
    pairs:      of the cases in which the two run something else
    missing:    cases of that kind that could not be compared, with the reason
    comparison: over the pairs: ratio > 1 means that the choice is faster; None where there is no pair
    saved_us:   of a mean step; share: that over the time of a step
    """

    settings: Setting
    op: str
    pairs: Sequence[Pair]
    missing: Mapping[str, str]
    comparison: Comparison | None
    noise: float = 0.0
    confidence: float = CONFIDENCE
    saved_us: float = 0.0
    share: float = 0.0

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
        """What a launch with this choice counts as saved; less than anything where it could not be
        compared."""
        if not self.is_complete:
            return -math.inf
        counts = self.is_clear and self.share >= LEAST * margin
        return self.saved_us if counts else min(self.saved_us, 0.0)

    @property
    def share_interval(self) -> tuple[float, float] | None:
        """`share` at both ends of the interval; None where that is infinite."""
        of = self.comparison
        if of is None or not (of.low > 0 and math.isfinite(of.high)) or of.ratio == 1:
            return None
        low, high = (self.share * (1 - 1 / end) / (1 - 1 / of.ratio) for end in (of.low, of.high))
        return low, high


@dataclass(frozen=True)
class Crossover:
    """Two neighbouring sizes at which different rows are fastest.

    at:   the size between them at which both rows take the same time, by their times at both; None where one
          was timed at one of them alone
    told: whether each is clearly faster than the other at its size
    """

    op: str
    fixed: str
    size: str
    below: int
    above: int
    at: float | None
    faster_below: str
    faster_above: str
    told: bool


@dataclass(frozen=True)
class BestCase:
    """The fastest row that the engine can be made to run for a case.

    chosen, best: the row of the decision, and the fastest; settings: with which the engine runs that
    clear:   whether it is clearly faster than the chosen one
    beyond:  the fastest row of all that were timed, where that is clearly faster and no flag of the engine
             runs it; beyond_us: its time
    """

    case: Weighed
    chosen: Pair
    best: Pair
    settings: Setting
    clear: bool
    beyond: Row | None
    beyond_us: float


@dataclass(frozen=True)
class Decision:
    """chosen:    what is to be set; empty where the default is left
    gain:      of the chosen launch, all ops together; None where the default is left
    choices:   of each op, of those that run the same the first
    undecided: cases in which the default itself has no time, with the reason
    likely:    the launch with the least time by the estimates alone, told or not
    failing:   launches with which the server fails, with the reason
    """

    launches: Launches
    chosen: Setting
    gain: Compared | None
    choices: Sequence[Compared]
    cases: Sequence[BestCase]
    crossovers: Sequence[Crossover]
    undecided: Mapping[str, str]
    margin: float
    likely: Setting
    failing: Mapping[str, str]

    @property
    def mix(self) -> Mix:
        return self.launches.mix

    @property
    def compared(self) -> list[Compared]:
        """The choices that could be compared, that which saves most first."""
        return sorted((each for each in self.choices if each.is_complete), key=lambda each: -each.saved_us)

    @property
    def taken(self) -> list[Compared]:
        """The choices that the chosen launch makes."""
        return self.made_by(self.chosen)

    def made_by(self, settings: Setting) -> list[Compared]:
        """The choices that a launch makes, of those that could be compared."""

        def runs(pair: Pair) -> bool:
            own = self.launches.pair(pair.case, settings)
            return own is not None and own.new is pair.new

        return [each for each in self.choices if each.is_complete and all(map(runs, each.pairs))]

    @property
    def regret(self) -> float:
        """What the chosen launch takes more than the best row of each case, as a share of the latter."""
        chosen = sum(each.case.calls * each.chosen.new_us for each in self.cases)
        best = sum(each.case.calls * each.best.new_us for each in self.cases)
        return chosen / best - 1 if best else 0.0


def decide(launches: Launches, margin: float = MARGIN, confidence: float = CONFIDENCE) -> Decision:
    """The decision among the candidates of the launches."""
    by_op = grouped(launches.decidable, lambda case: case.op)
    failing: dict[str, str] = {}
    every: list[tuple[Setting, list[Choice]]] = []
    for settings in _merged(launches, by_op):
        if why := launches.fails(settings):
            failing[launch_text(settings)] = why
        else:
            made = [(op, _runs(launches, own, settings)) for op, own in by_op.items()]
            every.append((settings, [choice for choice in made if choice[1]]))
    choices: dict[Choice, Setting] = {}  # the first of those that run the same in an op
    for settings, made in every:
        for choice in made:
            choices.setdefault(choice, settings)
    found = _together(launches, by_op, choices, confidence)

    def best(worth: Callable[[Compared], float]) -> tuple[float, Setting]:
        saved = [(sum(worth(found[choice]) for choice in made), settings) for settings, made in every]
        return max([(0.0, {}), *saved], key=lambda each: (each[0], -len(each[1])))

    saved_us, chosen = best(lambda choice: choice.credit_us(margin))
    likely = best(lambda choice: choice.saved_us if choice.is_complete else -math.inf)[1]
    gain = None
    if saved_us < margin * launches.step_us:
        chosen = {}
    elif chosen:
        joint = max(each.confidence for each in found.values())
        gain = _compared(launches, "", launches.decidable, chosen, joint)
    cases = launches.decidable
    each_sure = 1 - (1 - confidence) / max(1, len(cases) * len(launches.candidates))
    undecided = (case for case in launches.mix.cases if not launches.pair(case, {}))
    return Decision(
        launches, chosen, gain, list(found.values()),
        [_best(launches, case, chosen, each_sure) for case in cases],
        list(_crossovers(launches, cases, each_sure)),
        {case.text: _why(launches, case, {}) for case in undecided}, margin, likely, failing,
    )  # fmt: skip


Runs = frozenset[tuple[object, object]]
"""What a launch runs otherwise than the default: the case, and the timed row, or its name where it has no
time."""
Choice = tuple[str, Runs]
"""By op."""


def _merged(launches: Launches, by_op: Mapping[str, Sequence[Weighed]]) -> list[Setting]:
    """The candidates, and those that combine what is set for each op, also what the engine's rules and what a
    run of `toggle` set for one; the fewest settings first."""
    found: list[Setting] = [{}]
    candidates = launches.candidates
    varied = [settings for settings in candidates if settings in launches.measured.varied]
    for own in by_op.values():
        of_op = [settings for settings in candidates if _runs(launches, own, settings)]
        both = [one | other for one in of_op for other in varied if _agree(one, other)]
        for settings in [*found]:
            for other in (*of_op, *both):
                if _agree(settings, other) and settings | other not in found:
                    found.append(settings | other)
    return sorted(found[1:], key=len)


def _agree(one: Setting, other: Setting) -> bool:
    return all(other.get(name, value) == value for name, value in one.items())


def _runs(launches: Launches, cases: Sequence[Weighed], settings: Setting) -> Runs:
    """Empty where all cases run as by default."""
    differing = [(case, launches.pair(case, settings)) for case in cases if launches.differs(case, settings)]
    return frozenset(
        (case.key, id(pair.new) if pair else launches.row_name(case, settings))
        for case, pair in differing
        if pair is None or not pair.same
    )


def _why(launches: Launches, case: Weighed, settings: Setting) -> str:
    """Why a case has no time under a launch."""
    entry = launches.entry(case, settings)
    if entry is None:
        return f"what {launches.engine} runs is not known"
    if not entry.row:
        return f"{NO_ROW} {launches.engine} does: {entry.why}"
    for sheet in launches.sheets(case):
        if reason := sheet.untimed.get(entry.row):
            return f"{entry.row} is {reason}"
    rows = [row for sheet in launches.sheets(case) for row in sheet.rows if row.cell.impl == entry.row]
    if not rows:
        return f"{entry.row} was not measured"
    under = dict.fromkeys(launch_text({n: v for n, v in row.variables.items() if v}) for row in rows)
    if not settings and "the default" not in under:
        return f"{entry.row} was timed under {' and '.join(under)} alone: --with takes what is set as given"
    return f"{entry.row} was not measured beside the default in one run, boundary and launch mode"


def _together(
    launches: Launches,
    by_op: Mapping[str, Sequence[Weighed]],
    choices: Mapping[Choice, Setting],
    confidence: float,
) -> dict[Choice, Compared]:
    """All choices, each at a confidence at which they hold together: those that are clear leave their share
    of the error to the others (Holm, see harness.statistics.multiple)."""
    found: dict[Choice, Compared] = {}
    left, asked = [*choices], len(choices) + 1
    while len(left) < asked:
        asked = len(left)
        for choice in left:
            op, share = choice[0], 1 - (1 - confidence) / asked
            found[choice] = _compared(launches, op, by_op[op], choices[choice], share)
        left = [choice for choice in left if found[choice].verdict not in ("faster", "slower")]
    return found


def _compared(
    launches: Launches, op: str, cases: Sequence[Weighed], settings: Setting, confidence: float
) -> Compared:
    pairs, missing = [], {}
    for case in (case for case in cases if launches.differs(case, settings)):
        pair = launches.pair(case, settings)
        if pair is None:
            missing[case.text] = _why(launches, case, settings)
        elif not pair.same:
            pairs.append(pair)
    if not pairs:
        return Compared(settings, op, pairs, missing, None)
    before = sum(pair.case.calls * pair.us for pair in pairs)
    noise = sum(pair.case.calls * pair.us * pair.sheet.noise for pair in pairs) / before
    series = [pair.series(pair.case.calls) for pair in pairs]
    comparison = total_ratio(series, noise=noise, confidence=confidence)
    saved, step_us = before * (1 - 1 / comparison.ratio), launches.step_us
    return Compared(settings, op, pairs, missing, comparison, noise, confidence, saved, saved / step_us)


def _best(launches: Launches, case: Weighed, chosen: Setting, confidence: float) -> BestCase:
    own, plain = launches.pair(case, chosen), launches.pair(case, {})
    assert own and plain
    best, settings = own, chosen
    candidates = launches.candidates
    for other in ({}, *candidates, *(chosen | candidate for candidate in candidates)):
        pair = launches.pair(case, other)
        if pair and pair.new_us < best.new_us and not launches.fails(other):
            best, settings = pair, other
    clear = best.new is not own.new and _leads(best, own, confidence)
    beyond, beyond_us = None, best.new_us
    flagged = {entry.row for entry in engines.entries(launches.engine, case.op, launches.measured.arch)}
    for row in plain.sheet.rows:
        if row.cell.launch == plain.old.cell.launch and row.cell.impl not in flagged:
            found = against(plain.sheet, row, plain.old, confidence)
            if found.verdict == "faster" and plain.us / found.ratio < beyond_us:
                beyond, beyond_us = row, plain.us / found.ratio
    return BestCase(case, own, best, settings, clear, beyond, beyond_us)


def _leads(fast: Pair, slow: Pair, confidence: float) -> bool:
    """Whether one row is clearly faster; not known where the two were measured in different rounds."""
    return (
        fast.sheet is slow.sheet and against(fast.sheet, fast.new, slow.new, confidence).verdict == "faster"
    )


Point = tuple[int, dict[str, Pair]]
"""A size, and what the engine can be made to run there by name, the fastest first."""


def _crossovers(launches: Launches, cases: Sequence[Weighed], confidence: float) -> Iterator[Crossover]:
    """Along each size that grows with the load, the others being equal."""
    for op, own in grouped(cases, lambda case: case.op).items():
        for size in AXES[op][1]:
            lines: dict[str, list[Point]] = {}
            for case in own:
                fixed = text_of({name: value for name, value in case.sizes.items() if name != size})
                middle = sum(parse_span(case.sizes[size])) // 2
                lines.setdefault(fixed, []).append((middle, _fastest_first(launches, case)))
            for fixed, points in lines.items():
                for low, high in pairwise(sorted(points, key=lambda point: point[0])):
                    if low[0] < high[0] and next(iter(low[1])) != next(iter(high[1])):
                        yield _crossing(op, fixed, size, low, high, confidence)


def _fastest_first(launches: Launches, case: Weighed) -> dict[str, Pair]:
    rows: dict[str, Pair] = {}
    for settings in ({}, *launches.candidates):
        if (pair := launches.pair(case, settings)) and not launches.fails(settings):
            rows[launch_text(settings) if pair.new.variables else pair.new.cell.impl] = pair
    return dict(sorted(rows.items(), key=lambda item: item[1].new_us))


def _crossing(op: str, fixed: str, size: str, low: Point, high: Point, confidence: float) -> Crossover:
    (below, small), (above, large) = low, high
    first, last = next(iter(small)), next(iter(large))
    at, told = None, False
    if last in small and first in large:
        a = math.log(small[last].new_us / small[first].new_us)
        b = math.log(large[first].new_us / large[last].new_us)
        part = a / (a + b) if a + b else 0.5
        at = math.exp(math.log(below) + part * math.log(above / below))
        told = _leads(small[first], small[last], confidence) and _leads(large[last], large[first], confidence)
    return Crossover(op, fixed, size, below, above, at, first, last, told)
