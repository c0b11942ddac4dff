"""Interleaved timing: entries are timed one after the other, in rounds of a new random order each
(`measure`). `Policy` says how long and in what order; `Rounds` holds what was measured."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.statistics.intervals import CONFIDENCE, MIN_BLOCKS
from harness.statistics.multiple import stopping_reason
from harness.statistics.paired import MARGIN

Sampler = Callable[[], float]  # takes one timed sample of an entry and returns seconds per call

Disturbed = Literal["prefer", "keep", "refuse"]
"""Whether rounds count that other work on the machine disturbed. prefer: only quiet rounds count if there are
enough of them, otherwise all; keep: all count; refuse: only quiet ones do, with no result if most are not."""

MAX_DISTURBED = 0.5  # where more than this share of the rounds is disturbed, most of them are
ENOUGH_ROUNDS = 30  # after so many rounds, further ones are taken to be no quieter


def is_given_up(disturbed: int, made: int) -> bool:
    """Whether measuring ends because most of many rounds were disturbed."""
    return made >= ENOUGH_ROUNDS and disturbed > MAX_DISTURBED * made


@dataclass(frozen=True)
class Policy:
    """How long to measure, in what order, and for which questions."""

    blocks: int = 14
    """The most blocks; everything is prepared anew before each. Tight or clear results end measuring after
    MIN_BLOCKS blocks at the soonest, and never if `blocks` is no more than that."""
    first_rounds: int = 5  # rounds in each of the opening blocks: enough to see large differences
    max_rounds: int = 20  # the most rounds in each later block
    half_width: float = 0.005  # an interval as narrow as this is tight; 0: blocks or budget end measuring
    baseline: str | None = None  # the entry that all others are compared with; None: the first one
    rerun: str | None = None  # the baseline prepared a second time: its ratio to the baseline gives the noise
    confidence: float = CONFIDENCE  # the confidence with which all wanted verdicts hold together
    margin: float = MARGIN  # a smaller difference than this counts as none (`same`)
    slow: float = math.inf
    """An entry that takes more than this many times as long as the fastest is sampled only in a block's
    first round: the rest of the budget goes to the entries between which the choice is."""
    budget_s: float = 30.0  # seconds of samples for all blocks; a round that would not fit is not begun
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
        """The number of opening blocks: after the last of them measuring may end for the first time."""
        return min(MIN_BLOCKS, self.blocks) if self.half_width > 0 else self.blocks


@dataclass(frozen=True)
class Round:
    """One sample of each entry."""

    block: int
    index: int  # the number of the round in its block
    seconds: Mapping[str, float]  # seconds per call of each entry that gave a time
    disturbed: str = ""  # what disturbed the round; empty if nothing did
    took: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)
    """The seconds that the sample of each of these entries took as a whole."""
    use: Literal["counts", "left out", "elimination"] = "counts"
    """Whether the round `counts` for the result, is `left out` because it was disturbed, or is an
    `elimination` round of a race, by which the entries of later rounds are chosen (successive_halving.py)."""


@dataclass
class Rounds:
    """All that was measured."""

    made: list[Round] = field(default_factory=list)  # all rounds, in the order in which they were made
    dropped: dict[str, str] = field(default_factory=dict)
    """Entries that were taken out, with the reasons. Their earlier times stay in `made`."""
    beaten: dict[str, str] = field(default_factory=dict)  # entries that lost in eliminations, and how
    stopped: str = "complete"
    """Why measuring ended: `tight` (all intervals are), `clear` (each interval is tight, or its verdict is
    not `unclear`), `budget` (it is spent), `complete` (all blocks and rounds were made), `disturbed` (most
    rounds were, and disturbed ones are refused), or `no entries` (all were dropped)."""

    @property
    def rounds(self) -> list[Round]:
        """The rounds that count."""
        return [r for r in self.made if r.use == "counts"]

    @property
    def left_out(self) -> list[Round]:
        return [r for r in self.made if r.use == "left out"]

    @property
    def eliminations(self) -> list[Round]:
        return [r for r in self.made if r.use == "elimination"]

    @property
    def blocks(self) -> list[int]:
        """The block of each round that counts."""
        return [r.block for r in self.rounds]

    def series(self, entry: str) -> list[float]:
        """The entry's seconds in each round that counts; NaN where it gave no time."""
        return [r.seconds.get(entry, math.nan) for r in self.rounds]

    @property
    def spent_s(self) -> float:
        """Seconds spent in samples."""
        return sum(sum(r.took.values()) for r in self.made)

    def lasting(self, entries: Iterable[str]) -> list[str]:
        """Of these entries, those that were not dropped."""
        return [name for name in entries if name not in self.dropped]

    @property
    def next_block(self) -> int:
        """The number of a block that is made after these rounds."""
        return max((r.block for r in self.made), default=-1) + 1

    def numbered(self, first: int) -> Rounds:
        """The same rounds, with the numbers of their blocks raised by `first`."""
        return replace(self, made=[replace(r, block=first + r.block) for r in self.made])

    def then(self, after: Rounds) -> Rounds:
        """These rounds and those that were measured after them, as one."""
        return Rounds(
            self.made + after.numbered(self.next_block).made,
            self.dropped | after.dropped,
            self.beaten | after.beaten,
            after.stopped,
        )

    @property
    def most_are_disturbed(self) -> bool:
        """Whether most rounds were disturbed, whether they count or not."""
        return len([r for r in self.made if r.disturbed]) > MAX_DISTURBED * len(self.made)

    def choose_counted(self, blocks: int) -> bool:
        """Decides which rounds count: only quiet ones, if at least half of all rounds are quiet, if these lie
        in at least `blocks` blocks (or in every block so far), and if each entry has a time in them; else all
        rounds. The times play no part: leaving rounds out by their outcome would bias the rest.

        Returns whether measuring may end with this choice. It may not where all rounds count although most
        are quiet: further blocks bring the quiet rounds that are missing.
        """
        quiet = [r for r in self.made if not r.disturbed]
        quiet_blocks = {r.block for r in quiet}
        all_blocks = {r.block for r in self.made}
        has_blocks = len(quiet_blocks) >= min(blocks, len(all_blocks))
        without_quiet = _entries_with_times(self.made) - _entries_with_times(quiet) - self.dropped.keys()
        only_quiet = has_blocks and not without_quiet and not self.most_are_disturbed
        self.made = [
            replace(r, use="left out" if r.disturbed and only_quiet else "counts") for r in self.made
        ]
        return only_quiet or self.most_are_disturbed


def _entries_with_times(rounds: Iterable[Round]) -> set[str]:
    return {name for r in rounds for name in r.seconds}


TRIES = 2  # a block makes up to this many times the rounds that it wants, because some may be disturbed


def measure(entries: Mapping[str, Sampler], policy: Policy | None = None) -> Rounds:
    """Times entries round by round until the policy is satisfied. An entry that raises, or that returns
    anything but a positive finite number, is dropped. Only the samplers can have deadlines.

    The opening blocks are short: few rounds suffice for a large difference if each entry is prepared several
    times. If verdicts are open then, long blocks follow, with a look at the results after each.

    A disturbed round is made again, up to TRIES times the wanted rounds. Where most rounds were disturbed,
    `prefer` counts all of them (`choose_counted`) and makes none again, because further blocks tell more;
    `refuse` counts no disturbed one and stops, and there is no result.
    """
    import scipy.special  # noqa: F401 - a look needs it, and it must not be loaded between samples

    policy = policy or Policy()
    rounds = Rounds()
    generator = random.Random(policy.seed)
    round_s = 0.0  # the seconds that one more round of the last block would have taken
    preparing_s = 0.0  # the seconds that preparing for the last block took
    for block in range(policy.blocks):
        lasting = rounds.lasting(entries)
        if not lasting:
            break
        is_opening = block < policy.opening
        remaining_s = policy.budget_s - rounds.spent_s
        # A later block is worth its preparation only if at least this much of the budget is left for its
        # rounds: the time that the rounds of an opening block take, and that the preparation takes.
        least_block_s = 0.0 if is_opening else max(policy.first_rounds * round_s, preparing_s)
        longest_round_s = max((sum(r.took.values()) for r in rounds.made), default=0.0)
        if rounds.made and remaining_s < max(longest_round_s, least_block_s):
            rounds.stopped = "budget"
            break
        started = policy.clock()
        policy.begin_block(block, lasting)
        preparing_s = policy.clock() - started
        # Opening blocks share the remaining budget; after them, the later blocks that are worth preparing.
        sharing_blocks = (policy.opening if is_opening else policy.blocks) - block
        if least_block_s:
            sharing_blocks = min(sharing_blocks, int(remaining_s / least_block_s))
        end_s = rounds.spent_s + remaining_s / sharing_blocks
        samplers = {name: entries[name] for name in lasting}
        round_s = _make_block(block, samplers, rounds, policy, generator, end_s)
        reason = _reason_to_stop(block, list(entries), policy, rounds)
        if reason:
            rounds.stopped = reason
            break
    if not rounds.lasting(entries):
        rounds.stopped = "no entries"
    elif policy.disturbed == "refuse" and rounds.most_are_disturbed:
        rounds.stopped = "disturbed"
    return rounds


def _make_block(
    block: int,
    samplers: Mapping[str, Sampler],
    rounds: Rounds,
    policy: Policy,
    generator: random.Random,
    end_s: float,
) -> float:
    """Makes a block's rounds. Returns the seconds that another would take. end_s: what `spent_s` may reach"""
    keep_disturbed = policy.disturbed == "keep" or (
        policy.disturbed == "prefer" and block > 0 and rounds.most_are_disturbed
    )
    is_short = block < policy.opening and policy.opening < policy.blocks
    most_rounds = min(policy.first_rounds, policy.max_rounds) if is_short else policy.max_rounds
    names = list(samplers)
    counted = 0  # how many of the block's rounds count for certain
    round_s = 0.0
    for index in range(TRIES * most_rounds):
        if index > 0 and rounds.spent_s + round_s > end_s:
            rounds.stopped = "budget"  # `measure` replaces it where measuring ends for another reason
            break
        order = list(names)
        generator.shuffle(order)
        made = _make_round(block, index, {name: samplers[name] for name in order}, rounds, policy)
        if made.disturbed and not keep_disturbed:
            made = replace(made, use="left out")
        rounds.made.append(made)
        if not made.seconds:
            break
        # After the first round of the block that counts, slow entries are not sampled any more. With `prefer`
        # a disturbed round may count in the end, so that they are sampled in no more than two rounds.
        is_enough = made.use == "counts" or (index > 0 and policy.disturbed == "prefer")
        names = _not_slow(made, policy) if is_enough else list(made.seconds)
        round_s = sum(made.took[name] for name in names)
        if made.use == "counts":
            counted += 1
        if counted == most_rounds:
            break
    return round_s


def _make_round(
    block: int, index: int, samplers: Mapping[str, Sampler], rounds: Rounds, policy: Policy
) -> Round:
    """Takes one sample of each entry, in this order. Drops an entry that gives no time, in `rounds.dropped`;
    the seconds that its sample took do not count as spent."""
    policy.begin_round()
    seconds: dict[str, float] = {}
    took: dict[str, float] = {}
    for name, sampler in samplers.items():
        started = policy.clock()
        try:
            value = sampler()
        except Exception as error:
            rounds.dropped[name] = str(error) or type(error).__name__
            continue
        if isinstance(value, int | float) and math.isfinite(value) and value > 0:
            seconds[name] = float(value)
            took[name] = policy.clock() - started
        else:
            rounds.dropped[name] = f"gave {value!r} as its time"
    return Round(block, index, seconds, policy.end_round(), took)


def _not_slow(made: Round, policy: Policy) -> list[str]:
    """The entries of a round that are not slow (see `Policy.slow`); all entries if that would leave one."""
    fastest = min(made.seconds.values())
    fast = [name for name, seconds in made.seconds.items() if seconds <= policy.slow * fastest]
    return fast if len(fast) > 1 else list(made.seconds)


def _reason_to_stop(block: int, names: Sequence[str], policy: Policy, rounds: Rounds) -> str:
    """Decides which rounds count. Returns why measuring may end, as `Rounds.stopped`; empty if it may not."""
    if policy.disturbed == "prefer":
        if not rounds.choose_counted(policy.opening):
            return ""
    elif is_given_up(len(rounds.left_out), len(rounds.made)):
        return "disturbed"
    is_last = block + 1 == policy.blocks
    if is_last or len(set(rounds.blocks)) < policy.opening:
        return ""
    lasting = rounds.lasting(names)
    series = {name: rounds.series(name) for name in lasting}
    typical: dict[str, float] = {}  # the median seconds of each entry that gave a time
    for name in lasting:
        times = [seconds for seconds in series[name] if not math.isnan(seconds)]
        if times and name != policy.rerun:
            typical[name] = statistics.median(times)
    # Measuring does not go on for the sake of slow entries, which are rarely sampled.
    most_s = policy.slow * min(typical.values(), default=math.nan)
    contenders = [name for name, seconds in typical.items() if seconds <= most_s]
    return stopping_reason(
        series,
        rounds.blocks,
        contenders,
        policy.baseline or names[0],
        rerun=policy.rerun,
        confidence=policy.confidence,
        half_width=policy.half_width,
        margin=policy.margin,
    )
