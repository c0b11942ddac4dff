"""What interleaved timing is asked for (`Policy`) and what it records (`Round`, `Rounds`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.statistics.intervals import CONFIDENCE, MIN_BLOCKS
from harness.statistics.paired import MARGIN

Sample = Callable[[], float]  # takes one timed sample of an entry and returns seconds per call

Disturbed = Literal["prefer", "keep", "refuse"]
"""How rounds count that other work on the machine disturbed. prefer: quiet rounds alone count where enough
of them can be had, else all count; keep: all count; refuse: none counts, and where most are disturbed there
is no result."""

MAX_DISTURBED, ENOUGH_ROUNDS = 0.5, 30
"""A machine is never quiet where a larger share than this of the rounds is disturbed; so many rounds show
it."""


def mostly_disturbed(disturbed: int, made: int) -> bool:
    """Whether so many rounds were made, and most of them disturbed, that further ones would be no better."""
    return made >= ENOUGH_ROUNDS and disturbed > MAX_DISTURBED * made


@dataclass(frozen=True)
class Policy:
    """How long to measure, in what order, and for which questions."""

    blocks: int = 14
    """How often everything is prepared anew, at most. Measuring may end after MIN_BLOCKS blocks or more; with
    no more blocks than these there is nothing to decide."""
    first_rounds: int = 5
    """Rounds in each of the first MIN_BLOCKS blocks: enough to see large differences."""
    max_rounds: int = 20  # the most rounds in each later block
    half_width: float = 0.005
    """An interval of a ratio is tight enough at this half width; 0: measuring goes on until blocks or
    budget are spent."""
    baseline: str | None = None  # the entry that all others are compared with; None: the first one
    rerun: str | None = None
    """The baseline prepared a second time: its ratio to the baseline gives the noise."""
    confidence: float = CONFIDENCE  # the confidence with which all wanted verdicts hold together
    margin: float = MARGIN  # a smaller difference than this counts as none (`same`)
    slow: float = math.inf
    """An entry that takes more than this many times as long as the fastest is sampled in a block's first
    round
    only: the rest of the budget goes to the entries between which the choice is."""
    budget_s: float = 30.0
    """Seconds of samples for all blocks together. A round that would not fit is not begun."""
    begin_block: Callable[[int, Collection[str]], None] = lambda block, entries: None
    """Called before each block with its number and its entries, to prepare them anew; outside the budget."""
    begin_round: Callable[[], None] = lambda: None  # called before each round
    end_round: Callable[[], str] = lambda: ""
    """Called after each round. Returns what disturbed the machine meanwhile, in a short phrase, or an empty
    string. It must not depend on the times: leaving out rounds by their outcome biases the rest."""
    disturbed: Disturbed = "prefer"  # whether disturbed rounds count
    seed: int = 0  # the seed of the random orders
    clock: Callable[[], float] = time.perf_counter

    @property
    def opening(self) -> int:
        """The number of blocks after which measuring may end."""
        return min(MIN_BLOCKS, self.blocks) if self.half_width > 0 else self.blocks

    def rounds_in(self, block: int) -> int:
        """How many rounds a block wants."""
        is_short = block < self.opening < self.blocks
        return min(self.first_rounds, self.max_rounds) if is_short else self.max_rounds


@dataclass(frozen=True)
class Round:
    """One sample of each entry."""

    block: int
    index: int  # the number of the round in its block
    seconds: Mapping[str, float]  # seconds per call of each entry that gave a time
    disturbed: str = ""  # what disturbed the round; empty if nothing did
    took: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)
    """The seconds that each of these samples took."""


@dataclass
class Rounds:
    """All that was measured."""

    rounds: list[Round] = field(default_factory=list)  # the rounds that count
    disturbed: list[Round] = field(default_factory=list)
    """The rounds that do not count because they were disturbed. Their time was spent all the same."""
    eliminations: list[Round] = field(default_factory=list)
    """The elimination rounds of a race. They choose the entries of `rounds` and count for nothing else (see
    successive_halving.py)."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Entries that were taken out, each with the reason. Their earlier times stay in `rounds`."""
    beaten: dict[str, str] = field(default_factory=dict)
    """Entries that lost in the eliminations, each with the words for it."""
    stopped: str = "complete"
    """Why measuring ended: `tight` (the wanted ratios' intervals are), `clear` (those intervals are tight
    or their verdicts clear), `budget`, `complete` (all blocks and rounds were made), `disturbed` (most
    rounds were, and are refused), or `no entries`."""
    spent_s: float = 0.0  # seconds spent in samples
    last: Round | None = field(default=None, compare=False, repr=False)
    """The round that was made last."""

    def add(self, made: Round, counts: bool) -> None:
        """Records a round that was just made."""
        self.last = made
        self.spent_s += sum(made.took.values())
        if counts:
            self.rounds.append(made)
        else:
            self.disturbed.append(made)

    def lasting(self, entries: Iterable[str]) -> list[str]:
        """Of these entries, those that were not dropped."""
        return [name for name in entries if name not in self.dropped]

    def series(self, entry: str) -> list[float]:
        """The entry's seconds in each round that counts; NaN where it gave no time."""
        return [r.seconds.get(entry, math.nan) for r in self.rounds]

    @property
    def blocks(self) -> list[int]:
        """The block of each round that counts."""
        return [r.block for r in self.rounds]

    def numbered(self, first: int) -> Rounds:
        """The same rounds, with the first block's number raised by `first` and the others' with it."""
        moved = {
            kind: [replace(r, block=first + r.block) for r in getattr(self, kind)]
            for kind in ("rounds", "disturbed", "eliminations")
        }
        return replace(self, **moved)  # type: ignore[arg-type]

    def then(self, after: Rounds) -> Rounds:
        """These rounds and those that were measured after them, as one."""
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
        """The number of all rounds, including disturbed ones."""
        return len(self.all)

    @property
    def longest_s(self) -> float:
        """The seconds that the longest round took."""
        return max((sum(r.took.values()) for r in self.all), default=0.0)

    @property
    def mostly_disturbed(self) -> bool:
        """Whether most rounds do not count."""
        return len(self.disturbed) > MAX_DISTURBED * self.made

    @property
    def never_quiet(self) -> bool:
        """Whether most rounds were disturbed, whether they count or not."""
        return sum(bool(r.disturbed) for r in self.all) > MAX_DISTURBED * self.made

    @property
    def useless(self) -> bool:
        """Whether so many rounds were disturbed that further ones are not worth their time."""
        return mostly_disturbed(len(self.disturbed), self.made)

    def choose(self, blocks: int) -> bool:
        """Decides which rounds count. Quiet rounds alone count where they are at least half of all, lie in
        `blocks` blocks or in all that there are, and leave no entry without a time; otherwise all rounds
        count. The times themselves play no part: leaving rounds out by their outcome would bias the rest.
        Returns whether another block may make the quiet rounds enough."""
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
