"""What an engine lets one choose at its launch: flags and variables, and the rows that it runs with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.decide.measured import LAUNCHES, Measured, Row, Sheet
from harness.decide.mix import Mix, Weighed
from kernels import engines
from kernels.engines import EngineDefault
from kernels.engines.deploy import SPLITS

Settings = Mapping[str, str]
"""Flags without their dashes, and variables, by name, as `kernels.engines.default` takes them."""

NO_CHOICE = ("kv-cache-memory-bytes", "block-size", "kv-cache-dtype")
"""Flags on which the engine's choice depends, but which say something else: they change the cases."""


def launch_text(settings: Settings) -> str:
    """As on a command line; `the default` where nothing is set."""
    words = [f"{name}={value}" for name, value in settings.items() if not name.islower()]
    words += [f"--{name} {value}".strip() for name, value in settings.items() if name.islower()]
    return " ".join(words) or "the default"


@dataclass(frozen=True)
class Pair:
    """A case under two launches: the rows that they run, timed in the same rounds."""

    case: Weighed
    sheet: Sheet
    old: Row
    new: Row


@dataclass
class Launches:
    """Which rows an engine runs for the cases of a mix, under its settings."""

    engine: str
    measured: Measured
    mix: Mix
    base: Settings
    """What is set for the engine before anything is chosen."""
    _entries: dict[object, EngineDefault | None] = field(default_factory=dict)
    _pairs: dict[object, Pair | None] = field(default_factory=dict)

    def sheets(self, case: Weighed) -> Sequence[Sheet]:
        return self.measured.sheets.get(case.key, ())

    def _matters(self, case: Weighed, settings: Settings) -> frozenset[tuple[str, str]]:
        """The settings on which depends what runs in a case, as far as is known."""
        names = self._known(case.op).union(*(sheet.varied for sheet in self.sheets(case)))
        return frozenset(item for item in settings.items() if item[0] in names)

    def entry(self, case: Weighed, settings: Settings) -> EngineDefault | None:
        """What the engine runs for a case with these settings beside the base."""
        key = case.key, self._matters(case, settings)
        if key not in self._entries:
            given = {**self.base, **settings}
            self._entries[key] = engines.choices(case.op, self.measured.arch, case.sizes, given).get(
                self.engine
            )
        return self._entries[key]

    def row_name(self, case: Weighed, settings: Settings) -> str:
        """Empty where no row of the suite does what the engine does."""
        entry = self.entry(case, settings)
        return entry.row if entry else ""

    def pair(self, case: Weighed, old: Settings, new: Settings) -> Pair | None:
        """None where no run timed both rows in the same rounds."""
        key = case.key, self._matters(case, old), self._matters(case, new)
        if key not in self._pairs:
            self._pairs[key] = self._pair(case, old, new)
        return self._pairs[key]

    def _pair(self, case: Weighed, old: Settings, new: Settings) -> Pair | None:
        both = [(self.row_name(case, each), {**self.base, **each}) for each in (old, new)]
        for launch in LAUNCHES:
            for sheet in self.sheets(case):
                rows = [sheet.find(name, given, launch) for name, given in both]
                if rows[0] and rows[1] and self._tells(sheet, case, old, new):
                    return Pair(case, sheet, rows[0], rows[1])
        return None

    def _tells(self, sheet: Sheet, case: Weighed, old: Settings, new: Settings) -> bool:
        """Whether a sheet has the two launches apart: what the engine's rules do not know has to be varied in
        its run, where any run of the case varied it."""
        changed = {name for name in {*old, *new} if old.get(name) != new.get(name)} - self._known(case.op)
        every = frozenset().union(*(each.varied for each in self.sheets(case)))
        return changed & every <= sheet.varied

    def differs(self, case: Weighed, old: Settings, new: Settings) -> bool:
        """Whether the engine runs another row, or a run measured a variable by which the two differ."""
        if self.row_name(case, old) != self.row_name(case, new):
            return True
        changed = {name for name in {*old, *new} if old.get(name) != new.get(name)}
        return any(changed & sheet.varied for sheet in self.sheets(case))

    def _known(self, op: str) -> set[str]:
        """The names that decide something of what is recorded about the engine and an op."""
        entries = engines.entries(self.engine, op, self.measured.arch)
        return {name for entry in entries for name in entry.settings}

    def candidates(self) -> list[dict[str, str]]:
        """The settings that are worth comparing: those that the engine's rules name for an op of the mix, and
        those that a run measured; not those that change which calls there are."""
        found: list[dict[str, str]] = []
        for settings in self._named():
            own = {name: value for name, value in settings.items() if self.base.get(name) != value}
            kept = {*SPLITS[self.engine], *NO_CHOICE, *self.base}  # what the user has set stays
            if own and own not in found and not {*own} & kept:
                found.append(own)
        return found

    def _named(self) -> Iterator[dict[str, str]]:
        for op in dict.fromkeys(case.op for case in (*self.mix.cases, *self.mix.uncovered)):
            for entry in engines.entries(self.engine, op, self.measured.arch):
                yield entry.settings
        yield from self.measured.varied


def offered(
    launches: Launches, case: Weighed, choices: Iterable[Settings]
) -> Iterator[tuple[Settings, Pair]]:
    """The timed rows that the engine can be made to run for a case, beside that of the default, which is the
    first."""
    for settings in ({}, *choices):
        if pair := launches.pair(case, {}, settings):
            yield settings, pair


def rows_of(pairs: Sequence[Pair]) -> str:
    """The rows that a choice swaps, for people: `flash_attn.fa3@vllm -> flashmla`."""
    swaps = dict.fromkeys(
        f"{pair.old.cell.impl} -> {pair.new.cell.impl}"
        for pair in pairs
        if pair.old.cell.impl != pair.new.cell.impl
    )
    return ", ".join(swaps) or ", ".join(dict.fromkeys(pair.new.cell.impl for pair in pairs))
