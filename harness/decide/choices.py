"""What an engine lets one choose at its launch: flags and variables, and the rows that it runs with them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from harness.decide.measured import BOUNDARIES, LAUNCH_MODES, Measured, Row, Sheet
from harness.decide.mix import Mix, WeighedCase
from harness.statistics.paired import Comparison, compare
from harness.statistics.totals import Times
from kernels import engines
from kernels.engines import EngineDefault
from kernels.engines.deploy import SPLITS

LaunchSettings = dict[str, str]
"""Flags without their dashes, and variables, by name, as `kernels.engines.default` takes them."""

NO_CHOICE = ("kv-cache-memory-bytes", "block-size", "kv-cache-dtype")
"""Flags on which the engine's choice depends, but which also change the sizes that a server calls."""


def words_of(settings: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables, and the flags as words of a command line. Flags have names in lower case."""
    variables = {name: value for name, value in settings.items() if not name.islower()}
    flags = [f"--{name} {value}".rstrip() for name, value in settings.items() if name.islower()]
    return variables, flags


def launch_text(settings: Mapping[str, str]) -> str:
    """The settings as on a command line; `the default` where nothing is set."""
    variables, flags = words_of(settings)
    return " ".join([f"{name}={value}" for name, value in variables.items()] + flags) or "the default"


@dataclass(frozen=True)
class Pair:
    """The rows that run in a case by default and under other settings, timed in the same rounds."""

    case: WeighedCase
    sheet: Sheet
    old: Row  # that of the default
    new: Row  # that of the settings
    us: float
    """The time of the default in the run from which all of the default's times are taken. The sheet may be of
    another run: ratios carry over from one run to another, and times do not."""

    @property
    def is_unchanged(self) -> bool:
        return self.old is self.new

    @functools.cached_property
    def ratio(self) -> float:
        """The time of the default over that of the other row."""
        return 1.0 if self.is_unchanged else compare_rows(self.sheet, self.new, self.old).ratio

    @property
    def new_us(self) -> float:
        return self.us / self.ratio

    def series(self, calls: float) -> tuple[float, Times, Times]:
        """A weight, and the times of the new and the old row, as `total_ratio` takes them."""
        weight = calls * self.us / self.old.us  # so that a call of the old row counts with the time `us`
        return weight, self.new.cell.samples.by_round, self.old.cell.samples.by_round


def compare_rows(sheet: Sheet, row: Row, other: Row, confidence: float = 0.95) -> Comparison:
    """A row against another one of the sheet, by the rounds that both have. Above 1 the row is faster."""
    times = row.cell.samples.by_round
    other_times = other.cell.samples.by_round
    rounds = sorted(times.keys() & other_times.keys())
    blocks = [block for block, _ in rounds]
    return compare(
        [times[key] for key in rounds], [other_times[key] for key in rounds], blocks=blocks,
        floor=sheet.noise, confidence=confidence,
    )  # fmt: skip


@dataclass
class Launches:
    """Which rows an engine runs for the cases of a mix under settings, and their times."""

    engine: str
    measured: Measured
    mix: Mix
    base: Mapping[str, str]  # the settings that are set in every launch
    _rules: dict[object, EngineDefault | None] = field(default_factory=dict)
    _pairs: dict[object, Pair | None] = field(default_factory=dict)
    _names: dict[str, frozenset[str]] = field(default_factory=dict)

    def sheets(self, case: WeighedCase) -> Sequence[Sheet]:
        return self.measured.sheets.get(case.key, ())

    def rule(self, case: WeighedCase, settings: Mapping[str, str]) -> EngineDefault | None:
        """The recorded rule of what the engine runs for a case with these settings beside the base."""
        key = case.key, self._effective(case, settings)
        if key not in self._rules:
            by_engine = engines.choices(case.op, self.measured.arch, case.sizes, {**self.base, **settings})
            self._rules[key] = by_engine.get(self.engine)
        return self._rules[key]

    def row_name(self, case: WeighedCase, settings: Mapping[str, str]) -> str:
        """Empty where no row of the suite does what the engine does."""
        rule = self.rule(case, settings)
        return rule.row if rule else ""

    def fails(self, settings: Mapping[str, str]) -> str:
        """Why a server starts without these settings and not with them; empty: no failure is known."""
        for case in self.mix.every:
            rule = self.rule(case, settings)
            if rule and rule.fails and rule is not self.rule(case, {}):
                return rule.why
        return ""

    def _row_in(self, sheet: Sheet, case: WeighedCase, settings: Mapping[str, str], mode: str) -> Row | None:
        return sheet.find(self.row_name(case, settings), {**self.base, **settings}, mode)

    def pair(self, case: WeighedCase, settings: Mapping[str, str]) -> Pair | None:
        """The default and these settings, in the first boundary and launch mode in which the default has a
        time; None where no run timed both in the same rounds. Without settings: the default twice."""
        key = case.key, self._effective(case, settings)
        if key not in self._pairs:
            differs = self.differs(case, settings)
            self._pairs[key] = self._swapped_pair(case, settings) if differs else self._default_pair(case)
        return self._pairs[key]

    def _default_pair(self, case: WeighedCase) -> Pair | None:
        for boundary, mode in product(BOUNDARIES, LAUNCH_MODES):
            for sheet in self.sheets(case):
                if sheet.case.boundary == boundary and (row := self._row_in(sheet, case, {}, mode)):
                    return Pair(case, sheet, row, row, row.us)
        return None

    def _swapped_pair(self, case: WeighedCase, settings: Mapping[str, str]) -> Pair | None:
        default = self.pair(case, {})
        if default is None:
            return None
        boundary = default.sheet.case.boundary
        mode = default.old.cell.launch
        # Settings that no rule names may still change a time. Only a run that varied them shows it.
        unknown = self._varied(case).intersection(settings) - self.known_names(case.op)
        for sheet in self.sheets(case):
            if sheet.case.boundary == boundary and unknown <= sheet.varied:
                old = self._row_in(sheet, case, {}, mode)
                new = self._row_in(sheet, case, settings, mode)
                if old and new and old.cell.samples.by_round.keys() & new.cell.samples.by_round.keys():
                    return Pair(case, sheet, old, new, default.us)
        return None

    def differs(self, case: WeighedCase, settings: Mapping[str, str]) -> bool:
        """Whether the engine runs another row, or a run measured a variable of these settings."""
        other_row = self.row_name(case, {}) != self.row_name(case, settings)
        return other_row or not self._varied(case).isdisjoint(settings)

    def _effective(self, case: WeighedCase, settings: Mapping[str, str]) -> frozenset[tuple[str, str]]:
        """The part of the settings that may change what runs in a case, as far as is known."""
        names = self.known_names(case.op) | self._varied(case)
        return frozenset((name, value) for name, value in settings.items() if name in names)

    def _varied(self, case: WeighedCase) -> frozenset[str]:
        """The variables that a run of the case varied."""
        return frozenset().union(*(sheet.varied for sheet in self.sheets(case)))

    def known_names(self, op: str) -> frozenset[str]:
        """The names of the flags and variables that the engine's recorded rules for an op ask for."""
        if op not in self._names:
            rules = engines.entries(self.engine, op, self.measured.arch)
            self._names[op] = frozenset(name for rule in rules for name in rule.settings)
        return self._names[op]

    @functools.cached_property
    def decidable(self) -> list[WeighedCase]:
        """The cases in which the default has a time."""
        return [case for case in self.mix.cases if self.pair(case, {})]

    @functools.cached_property
    def step_us(self) -> float:
        """The time of the four ops in a step by default."""
        us = sum(case.calls * pair.us for case in self.decidable if (pair := self.pair(case, {})))
        # The data sheet says which part of the step the timed calls are.
        return us / (self.mix.share_of(self.decidable) or 1.0)

    @functools.cached_property
    def candidates(self) -> list[LaunchSettings]:
        """The settings to compare: those that the engine's rules name for an op of the mix, and those that a
        run measured. Settings that change which calls there are, or contradict the base, are left out."""
        of_rules: list[Mapping[str, str]] = []
        for op in dict.fromkeys(case.op for case in self.mix.every):
            of_rules += [rule.settings for rule in engines.entries(self.engine, op, self.measured.arch)]
        fixed = {*SPLITS[self.engine], *NO_CHOICE, *self.base}
        candidates: list[LaunchSettings] = []
        for settings in (*of_rules, *self.measured.settings):
            added = {name: value for name, value in settings.items() if self.base.get(name) != value}
            if added and added not in candidates and fixed.isdisjoint(added):
                candidates.append(added)
        return candidates


def rows_of(pairs: Sequence[Pair]) -> str:
    """The rows that a choice swaps, `flash_attn.fa3@vllm -> flashmla`; if it swaps none, those that run."""
    names = dict.fromkeys((pair.old.cell.impl, pair.new.cell.impl) for pair in pairs)
    swaps = [f"{old} -> {new}" for old, new in names if old != new]
    return ", ".join(swaps or [new for _, new in names])
