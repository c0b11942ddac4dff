"""Rounds of interleaved samples: the policy, one round, all rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.statistics.intervals import CONFIDENCE, MIN_BLOCKS
from harness.statistics.paired import MARGIN

Sample = Callable[[], float]
Disturbed = Literal["prefer", "keep", "refuse"]
"""What is done with rounds that something else disturbed: quiet ones are preferred, and where they cannot be
had all count; all count; or none does, and where most are disturbed there is no number."""

# Where a larger part of the rounds is disturbed the machine is never quiet; so many rounds show it.
MAX_DISTURBED, ENOUGH_ROUNDS = 0.5, 30


def mostly_disturbed(disturbed: int, made: int) -> bool:
    """Whether so many rounds were made, and most of them disturbed, that others would be no better."""
    return made >= ENOUGH_ROUNDS and disturbed > MAX_DISTURBED * made


def _nothing(*_: object) -> None:
    pass


def _undisturbed() -> str:
    return ""


@dataclass(frozen=True)
class Policy:
    """How long to measure, in what order, and what for.

    blocks:       how often everything is prepared anew at most. Measuring may end before, after
                  MIN_BLOCKS blocks or more; with no more than those there is nothing to decide
    first_rounds: rounds in each of the first MIN_BLOCKS blocks, enough to see what is far apart
    max_rounds:   rounds in each later block, at most
    half_width:   of a ratio's interval that is tight enough; 0: goes on until blocks or budget are spent
    baseline:       whom all others are compared with; the first entry where it is not said
    rerun:         the baseline prepared a second time, whose ratio to the baseline gives the noise
    confidence:   with which the wanted verdicts hold, all together
    margin:       a difference below it is none: `same`
    slow:         who takes more than this many times as long as the fastest has a sample in a block's first
                  round only: the rest of the budget goes to those between whom the choice is
    budget_s:     seconds of samples for all blocks together; a round that would not fit is not begun
    begin_block:  called before each block with its number and its entries, outside the budget, to prepare
                  them anew
    begin_round:  called before each round
    end_round:    called after it: what disturbed the machine meanwhile, in a short phrase, or nothing.
                  It must not depend on the times: leaving out rounds by their outcome biases the rest
    disturbed:    whether disturbed rounds count (see `Disturbed`)
    seed:         of the random order
    """

    blocks: int = 14
    first_rounds: int = 5
    max_rounds: int = 20
    half_width: float = 0.005
    baseline: str | None = None
    rerun: str | None = None
    confidence: float = CONFIDENCE
    margin: float = MARGIN
    slow: float = math.inf
    budget_s: float = 30.0
    begin_block: Callable[[int, Collection[str]], None] = _nothing
    begin_round: Callable[[], None] = _nothing
    end_round: Callable[[], str] = _undisturbed
    disturbed: Disturbed = "prefer"
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter

    @property
    def opening(self) -> int:
        """The first block after which measuring may end."""
        return min(MIN_BLOCKS, self.blocks) if self.half_width > 0 else self.blocks

    def rounds_in(self, block: int) -> int:
        short = block < self.opening < self.blocks
        return min(self.first_rounds, self.max_rounds) if short else self.max_rounds


@dataclass(frozen=True)
class Round:
    """Seconds per call of every entry that gave a time, and what disturbed it, if anything did."""

    block: int
    index: int
    seconds: Mapping[str, float]
    disturbed: str = ""


@dataclass
class Rounds:
    """All that was measured.

    rounds:    those that count
    disturbed: those that do not, having been disturbed; they were paid for
    eliminations:     elimination rounds of a race, which choose whom `rounds` hold and count for nothing
    else (see successive_halving.py)
    dropped:   entry -> why it was taken out; its earlier times stay in `rounds`
    beaten:    entry -> by whom in those
    stopped:   `tight` (the wanted ratios' intervals), `clear` (those intervals or their verdicts), `budget`,
               `complete` (all blocks and rounds), `disturbed` (most rounds were, and are refused), or
               `no entries`
    spent_s:   seconds spent in turns
    """

    rounds: list[Round] = field(default_factory=list)
    disturbed: list[Round] = field(default_factory=list)
    eliminations: list[Round] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    beaten: dict[str, str] = field(default_factory=dict)
    stopped: str = "complete"
    spent_s: float = 0.0

    def series(self, entry: str) -> list[float]:
        """One entry per round, NaN where the entry gave no time."""
        return [r.seconds.get(entry, math.nan) for r in self.rounds]

    @property
    def blocks(self) -> list[int]:
        return [r.block for r in self.rounds]

    def numbered(self, first: int) -> Rounds:
        """The same, the number of the first block being another."""

        def later(rounds: list[Round]) -> list[Round]:
            return [replace(r, block=first + r.block) for r in rounds]

        return replace(
            self,
            rounds=later(self.rounds),
            disturbed=later(self.disturbed),
            eliminations=later(self.eliminations),
        )

    def then(self, after: Rounds) -> Rounds:
        """These and what was measured after them, as if at one go."""
        after = after.numbered(self.next_block)
        return Rounds(
            self.rounds + after.rounds,
            self.disturbed + after.disturbed,
            self.eliminations + after.eliminations,
            self.dropped | after.dropped,
            self.beaten | after.beaten,
            after.stopped,
            self.spent_s + after.spent_s,
        )

    @property
    def all(self) -> list[Round]:
        return [*self.eliminations, *self.rounds, *self.disturbed]

    @property
    def next_block(self) -> int:
        return max((r.block for r in self.all), default=-1) + 1

    @property
    def made(self) -> int:
        """Rounds, the disturbed ones too."""
        return len(self.all)

    @property
    def mostly_disturbed(self) -> bool:
        return len(self.disturbed) > MAX_DISTURBED * self.made

    @property
    def never_quiet(self) -> bool:
        """Most rounds were disturbed, whether they count or not."""
        return sum(bool(r.disturbed) for r in self.all) > MAX_DISTURBED * self.made

    @property
    def useless(self) -> bool:
        """So many rounds were disturbed that more of them are not worth their time."""
        return mostly_disturbed(len(self.disturbed), self.made)

    def choose(self, blocks: int) -> bool:
        """Quiet rounds alone count where they are at least half of all, lie in so many blocks or in all that
        there are, and leave nobody without a time; else all do. The times themselves have no say: leaving
        rounds out by their outcome would bias the rest. Returns whether another block may make the quiet
        ones enough."""
        made = sorted([*self.rounds, *self.disturbed], key=lambda r: (r.block, r.index))
        quiet = [r for r in made if not r.disturbed]
        mostly_quiet = len(made) - len(quiet) <= MAX_DISTURBED * len(made)
        enough = min(blocks, len({r.block for r in made}))
        if (
            mostly_quiet
            and len({r.block for r in quiet}) >= enough
            and _timed(quiet) >= _timed(made) - self.dropped.keys()
        ):
            self.rounds, self.disturbed = quiet, [r for r in made if r.disturbed]
            return False
        self.rounds, self.disturbed = made, []
        return mostly_quiet


def _timed(rounds: Iterable[Round]) -> set[str]:
    return {name for r in rounds for name in r.seconds}
