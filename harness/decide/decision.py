"""The decision: the best launch of an engine that the measurements support, and what they leave open.

A choice swaps rows in the cases of an op. It is compared with the default over the cases in which the two run
something else, each counted with its calls, from paired rounds (harness.statistics.totals). The comparisons
of all choices hold together with the stated confidence (Holm).

A launch is a set of flags and variables. It saves what its choices save, op by op. A choice that is `faster`
beyond the noise counts with its estimate; one that is not told from the default counts as nothing, or with
its loss. The launch that saves most is taken, of equal ones that with the fewest settings, if it saves at
least the margin of the time of all cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.decide.choices import Launches, Pair, Settings, launch_text, offered
from harness.decide.measured import Row, Sheet
from harness.decide.mix import Mix, Weighed
from harness.report.text import grouped
from harness.serving.link.kernel_times import AXES
from harness.statistics.intervals import CONFIDENCE
from harness.statistics.paired import Comparison, compare
from harness.statistics.totals import total_ratio
from shapes.case import Size, text_of
from shapes.lengths import parse_span

MARGIN = 0.01
"""The share of the time of all cases that a choice must save. `serving ab` needs 12 pairs of launches to see
1 % of TPOT (docs/serving-ab.md)."""

NO_ROW = "no row does what"
"""How the reason begins where the suite has no implementation to measure."""

Setting = dict[str, str]


@dataclass(frozen=True)
class Compared:
    """A choice against the default."""

    settings: Setting
    op: str
    """Empty where it is of all ops."""
    pairs: Sequence[Pair]
    """The cases in which the two run something else."""
    missing: Mapping[str, str]
    """Cases of that kind that could not be compared, with the reason."""
    comparison: Comparison | None
    """Over the pairs: ratio > 1 means that the choice is faster. None where there is no pair."""
    noise: float = 0.0
    confidence: float = CONFIDENCE
    saved_us: float = 0.0
    """Of a mean step."""
    share: float = 0.0
    """`saved_us` over the time of all cases."""

    @property
    def is_complete(self) -> bool:
        return bool(self.pairs) and not self.missing

    @property
    def is_clear(self) -> bool:
        return self.is_complete and self.comparison is not None and self.comparison.verdict == "faster"

    @property
    def credit_us(self) -> float:
        """What a launch with this choice counts as saved; less than anything where it could not be
        compared."""
        if not self.is_complete:
            return -math.inf
        return self.saved_us if self.is_clear else min(self.saved_us, 0.0)

    def share_at(self, ratio: float) -> float:
        """`share` if the ratio were that end of its interval."""
        assert self.comparison
        now = 1 - 1 / self.comparison.ratio
        return self.share * (1 - 1 / ratio) / now if now else 0.0


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

    default: the row without the decision; chosen: with it; best: the fastest
    settings: with which the engine runs the fastest
    clear:   whether it is clearly faster than the chosen one
    beyond:  the fastest row of all that were timed, where that is clearly faster and no flag of the engine
             runs it
    """

    case: Weighed
    default: Row
    chosen: Row
    best: Row
    settings: Setting
    clear: bool
    beyond: Row | None


@dataclass(frozen=True)
class Decision:
    launches: Launches
    chosen: Setting
    """What is to be set; empty where the default is left."""
    gain: Compared | None
    """The chosen launch against the default, all ops together; None where the default is left."""
    choices: Sequence[Compared]
    """The choices of each op against the default, of those that run the same the first."""
    cases: Sequence[BestCase]
    crossovers: Sequence[Crossover]
    undecided: Mapping[str, str]
    """Cases in which the default itself has no time, with the reason."""
    margin: float
    likely: Setting
    """The launch with the least time by the estimates alone, told or not."""

    @property
    def mix(self) -> Mix:
        return self.launches.mix

    @property
    def taken(self) -> list[Compared]:
        """The choices that the chosen launch makes."""
        return self.made_by(self.chosen)

    def made_by(self, settings: Setting) -> list[Compared]:
        """The choices that a launch makes, of those that could be compared."""

        def runs(pair: Pair) -> bool:
            own = self.launches.pair(pair.case, {}, settings)
            return own is not None and own.new is pair.new

        return [each for each in self.choices if each.is_complete and all(map(runs, each.pairs))]

    def time_us(self, which: str = "chosen") -> float:
        """Of all cases in a mean step. which: chosen or best"""
        return sum(each.case.calls * getattr(each, which).us for each in self.cases)

    @property
    def regret(self) -> float:
        """What the chosen launch takes more than the best row of each case, as a share of the latter."""
        best = self.time_us("best")
        return self.time_us() / best - 1 if best else 0.0


def decide(launches: Launches, margin: float = MARGIN, confidence: float = CONFIDENCE) -> Decision:
    """The decision among the candidates of the launches."""
    candidates = launches.candidates()
    cases, undecided = _decidable(launches)
    by_op = grouped(cases, lambda case: case.op)
    merged = list(_merged(candidates, by_op, launches))
    choices: dict[tuple[str, Runs], Setting] = {}  # the first of those that run the same in an op
    for settings in merged:
        for op, own in by_op.items():
            if runs := _runs(launches, own, settings):
                choices.setdefault((op, runs), settings)
    everything = sum(case.calls * _us(launches, case, {}) for case in cases)
    found = _together(launches, by_op, choices, everything, confidence)

    def total(settings: Setting, worth: Callable[[Compared], float]) -> float:
        runs = ((op, _runs(launches, own, settings)) for op, own in by_op.items())
        return sum(worth(found[each]) for each in runs if each[1])

    def best(worth: Callable[[Compared], float]) -> tuple[float, Setting]:
        every = [({}, 0.0), *((settings, total(settings, worth)) for settings in merged)]
        settings, saved = max(every, key=lambda each: (each[1], -len(each[0])))
        return saved, settings

    saved_us, chosen = best(lambda choice: choice.credit_us)
    likely = best(lambda choice: choice.saved_us if choice.is_complete else -math.inf)[1]
    if saved_us < margin * everything:
        chosen = {}
    gain = None
    if chosen:
        joint = max(each.confidence for each in found.values())
        gain = _compared(launches, "", cases, chosen, everything, joint)
    return Decision(
        launches, chosen, gain, list(found.values()),
        [_best(launches, case, chosen, candidates) for case in cases],
        list(_crossovers(launches, cases, candidates)), undecided, margin, likely,
    )  # fmt: skip


Runs = frozenset[tuple[object, object]]
"""What a launch runs otherwise than the default: the case, and the timed row, or its name where it has no
time."""


def _merged(
    candidates: Sequence[Setting], by_op: Mapping[str, Sequence[Weighed]], launches: Launches
) -> Iterator[Setting]:
    """The candidates, and those that combine what is set for each op, of settings that do not exclude each
    other; the fewest settings first."""
    found: dict[frozenset[tuple[str, str]], Setting] = {frozenset(): {}}
    for own in by_op.values():
        of_op = [settings for settings in candidates if _runs(launches, own, settings)]
        for settings in list(found.values()):
            for other in of_op:
                both = settings | other
                if all(both[name] == value for name, value in settings.items()):
                    found.setdefault(frozenset(both.items()), both)
    yield from sorted((settings for settings in found.values() if settings), key=len)


def _runs(launches: Launches, cases: Sequence[Weighed], settings: Setting) -> Runs:
    """Empty where all cases run as by default."""
    runs = []
    for case in cases:
        if launches.differs(case, {}, settings):
            pair = launches.pair(case, {}, settings)
            if pair is None or pair.old is not pair.new:
                runs.append((case.key, id(pair.new) if pair else launches.row_name(case, settings)))
    return frozenset(runs)


def _decidable(launches: Launches) -> tuple[list[Weighed], dict[str, str]]:
    """The cases in which the engine's default has a time, and why others have none."""
    decidable, undecided = [], {}
    for case in launches.mix.cases:
        if launches.pair(case, {}, {}):
            decidable.append(case)
        else:
            undecided[case.text] = _why(launches, case, {})
    return decidable, undecided


def _why(launches: Launches, case: Weighed, settings: Settings) -> str:
    """Why a case has no time under a launch."""
    entry = launches.entry(case, settings)
    if entry is None:
        return f"what {launches.engine} runs is not known"
    if not entry.row:
        return f"{NO_ROW} {launches.engine} does: {entry.why}"
    for sheet in launches.sheets(case):
        if reason := sheet.untimed.get(entry.row):
            return f"{entry.row} is {reason}"
    every = {row.cell.impl for sheet in launches.sheets(case) for row in sheet.rows}
    return f"{entry.row} was not measured{' beside the default' if entry.row in every else ''}"


def _together(
    launches: Launches,
    by_op: Mapping[str, Sequence[Weighed]],
    choices: Mapping[tuple[str, Runs], Setting],
    everything: float,
    confidence: float,
) -> dict[tuple[str, Runs], Compared]:
    """All choices, each at a confidence at which they hold together: those that are clear leave their share
    of the error to the others (Holm, see harness.statistics.multiple)."""
    found: dict[tuple[str, Runs], Compared] = {}
    open_questions = [*choices]
    while open_questions:
        share = 1 - (1 - confidence) / len(open_questions)
        for key in open_questions:
            found[key] = _compared(launches, key[0], by_op[key[0]], choices[key], everything, share)
        told = [key for key in open_questions if found[key].comparison and _is_told(found[key])]
        if not told:
            break
        open_questions = [key for key in open_questions if key not in told]
    return {key: found[key] for key in choices}


def _is_told(choice: Compared) -> bool:
    return choice.comparison is not None and choice.comparison.verdict in ("faster", "slower")


def _compared(
    launches: Launches,
    op: str,
    cases: Sequence[Weighed],
    settings: Setting,
    everything: float,
    confidence: float,
) -> Compared:
    """everything: the time of all cases by default, us"""
    pairs, missing = [], {}
    for case in (case for case in cases if launches.differs(case, {}, settings)):
        if pair := launches.pair(case, {}, settings):
            if pair.old is not pair.new:
                pairs.append(pair)
        else:
            missing[case.text] = _why(launches, case, settings)
    if not pairs:
        return Compared(settings, op, pairs, missing, None)
    before = sum(pair.case.calls * pair.old.us for pair in pairs)
    noise = sum(pair.case.calls * pair.old.us * pair.sheet.noise for pair in pairs) / before
    series = [
        (pair.case.calls, pair.new.cell.samples.by_round, pair.old.cell.samples.by_round) for pair in pairs
    ]
    comparison = total_ratio(series, noise=noise, confidence=confidence)
    saved = before * (1 - 1 / comparison.ratio)
    return Compared(settings, op, pairs, missing, comparison, noise, confidence, saved, saved / everything)


def _us(launches: Launches, case: Weighed, settings: Settings) -> float:
    """The time of a case under a launch; of the default where that was not timed."""
    pair = launches.pair(case, settings, settings) or launches.pair(case, {}, {})
    assert pair
    return pair.new.us


def _best(launches: Launches, case: Weighed, chosen: Setting, candidates: Sequence[Setting]) -> BestCase:
    own = launches.pair(case, chosen, chosen)
    assert own
    best, settings, clear = own.new, chosen, False
    for other in ({}, *candidates, *(chosen | candidate for candidate in candidates)):
        pair = launches.pair(case, chosen, other)
        if pair and pair.new.us * own.new.us < best.us * pair.old.us:  # by the ratio to the chosen row
            best, settings, clear = pair.new, other, _is_faster(pair.sheet, pair.new, pair.old)
    beyond = None
    for row in own.sheet.rows:
        faster = row.cell.launch == own.new.cell.launch and row.us < (beyond or best).us
        if faster and _is_faster(own.sheet, row, own.new):
            beyond = row
    before = launches.pair(case, {}, chosen)
    return BestCase(case, before.old if before else own.new, own.new, best, settings, clear, beyond)


def _is_faster(sheet: Sheet, fast: Row, slow: Row) -> bool:
    """By the rounds that both have."""
    new, old = fast.cell.samples.by_round, slow.cell.samples.by_round
    shared = sorted(new.keys() & old.keys())
    found = compare(
        [new[at] for at in shared], [old[at] for at in shared], blocks=[block for block, _ in shared],
        floor=sheet.noise,
    )  # fmt: skip
    return found.verdict == "faster"


def _crossovers(
    launches: Launches, cases: Sequence[Weighed], candidates: Sequence[Setting]
) -> Iterator[Crossover]:
    """Along each size that grows with the load, the others being equal."""
    for op in dict.fromkeys(case.op for case in cases):
        for size in AXES[op][1]:
            lines: dict[str, list[tuple[int, Weighed]]] = {}
            for case in (case for case in cases if case.op == op):
                fixed = text_of({name: value for name, value in case.sizes.items() if name != size})
                lines.setdefault(fixed, []).append((_middle(case.sizes[size]), case))
            for fixed, points in lines.items():
                points.sort(key=lambda point: point[0])
                rows = [(at, _ranking(launches, case, candidates)) for at, case in points]
                for (below, low), (above, high) in pairwise(rows):
                    if below < above and low and high and low[0][0] != high[0][0]:
                        yield _crossing(op, fixed, size, (below, dict(low)), (above, dict(high)))


def _middle(value: Size) -> int:
    return sum(parse_span(value)) // 2


def _ranking(launches: Launches, case: Weighed, candidates: Sequence[Setting]) -> list[tuple[str, Pair]]:
    """The rows that the engine can be made to run, the fastest first, each with its name."""
    rows = {
        launch_text(settings) if pair.new.variables else pair.new.cell.impl: pair
        for settings, pair in offered(launches, case, candidates)
    }
    return sorted(rows.items(), key=lambda item: item[1].new.us)


def _crossing(
    op: str, fixed: str, size: str, low: tuple[int, dict[str, Pair]], high: tuple[int, dict[str, Pair]]
) -> Crossover:
    (below, small), (above, large) = low, high
    first, last = next(iter(small)), next(iter(large))
    at, told = None, False
    if last in small and first in large:
        a = math.log(small[last].new.us / small[first].new.us)
        b = math.log(large[first].new.us / large[last].new.us)
        part = a / (a + b) if a + b else 0.5
        at = math.exp(math.log(below) + part * math.log(above / below))
        told = _leads(small[first], small[last]) and _leads(large[last], large[first])
    return Crossover(op, fixed, size, below, above, at, first, last, told)


def _leads(fast: Pair, slow: Pair) -> bool:
    """Whether the one is clearly faster; not known where they were measured in different rounds."""
    return fast.sheet is slow.sheet and _is_faster(fast.sheet, fast.new, slow.new)
