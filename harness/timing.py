"""Blocks and rounds: contenders measured in turn, in fresh random order. Knows nothing of devices."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

Turn = Callable[[], float]


def _nothing(block: int) -> None:
    pass


@dataclass(frozen=True)
class Policy:
    """How long to measure and in what order.

    blocks:      how often everything is prepared anew, at least 5 for an interval that holds
    max_rounds:  rounds in a block at most
    slow:        who takes more than this many times as long as the fastest has a turn in a block's first
                 round only: the rest of the budget goes to those between whom the choice is
    budget_s:    seconds of turns for all blocks together; a round that would not fit is not begun
    begin_block: called before each block, outside the budget, to prepare the contenders anew
    seed:        of the random order
    """

    blocks: int = 5
    max_rounds: int = 20
    slow: float = math.inf
    budget_s: float = 10.0
    begin_block: Callable[[int], None] = _nothing
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class Round:
    """Seconds per call of every contender that gave a time."""

    block: int
    index: int
    seconds: Mapping[str, float]


@dataclass
class Rounds:
    """All that was measured.

    dropped: contender -> why it was taken out; its earlier times stay in `rounds`
    stopped: `complete` (all blocks and rounds), `budget`, or `no contenders`
    spent_s: seconds spent in turns
    """

    rounds: list[Round] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    stopped: str = "complete"
    spent_s: float = 0.0

    def table(self) -> pandas.DataFrame:
        """Seconds per call: (block, round) x contender."""
        import pandas

        index = pandas.MultiIndex.from_tuples(
            [(r.block, r.index) for r in self.rounds], names=["block", "round"]
        )
        return pandas.DataFrame([dict(r.seconds) for r in self.rounds], index=index)

    def series(self, contender: str) -> list[float]:
        """One entry per round, NaN where the contender gave no time."""
        return [r.seconds.get(contender, math.nan) for r in self.rounds]

    @property
    def blocks(self) -> list[int]:
        return [r.block for r in self.rounds]


def measure(contenders: Mapping[str, Turn], policy: Policy | None = None) -> Rounds:
    """Times the contenders round by round.

    Each contender performs one timed turn and returns seconds per call. One that raises, or returns
    anything but a positive finite number, is dropped; deadlines are the caller's.

    How many rounds are made depends on the budget and on how long rounds take, never on how the times
    compare (but for who is `slow`), so that looking cannot bias them.
    """
    policy = policy or Policy()
    order = random.Random(policy.seed)
    active = dict(contenders)
    result = Rounds()
    longest_round = 0.0
    for block in range(policy.blocks):
        if not active:
            break
        remaining = policy.budget_s - result.spent_s
        if result.rounds and remaining < longest_round:
            result.stopped = "budget"
            break
        policy.begin_block(block)
        block_end = result.spent_s + remaining / (policy.blocks - block)
        contending, expected_s = active, 0.0
        for index in range(policy.max_rounds):
            if index and result.spent_s + expected_s > block_end:
                result.stopped = "budget"
                break
            seconds, took = _one_round(contending, order, result.dropped, policy.clock)
            longest_round = max(longest_round, sum(took.values()))
            result.spent_s += sum(took.values())
            result.rounds.append(Round(block, index, seconds))
            active = {name: turn for name, turn in active.items() if name not in result.dropped}
            if not seconds:
                break
            fast = [name for name in seconds if seconds[name] <= policy.slow * min(seconds.values())]
            contending = {name: active[name] for name in (fast if len(fast) > 1 else seconds)}
            expected_s = sum(took[name] for name in contending)
    if not active:
        result.stopped = "no contenders"
    return result


def _one_round(
    contending: Mapping[str, Turn], order: random.Random, dropped: dict[str, str], clock: Callable[[], float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds per call of each contender, and the seconds that its turn took. What a contender wasted
    that gave no time is not the others' budget."""
    names = list(contending)
    order.shuffle(names)
    seconds, took = {}, {}
    for name in names:
        started = clock()
        try:
            value = contending[name]()
        except Exception as error:
            dropped[name] = str(error) or type(error).__name__
            continue
        if isinstance(value, int | float) and math.isfinite(value) and value > 0:
            seconds[name] = float(value)
            took[name] = clock() - started
        else:
            dropped[name] = f"gave {value!r} as its time"
    return seconds, took
