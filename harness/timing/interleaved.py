"""Interleaved timing: entries are timed in turn, in rounds of a new random order each."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.statistics.multiple import stopping_reason
from harness.timing.rounds import Policy, Round, Rounds, Sample

TRIES = 2
"""How many rounds a block may try for each that it wants: a disturbed round is made again, as long as most
are quiet."""


@dataclass(frozen=True)
class Order:
    """Which entries are sampled in the next round, in this order."""

    block: int
    round: int
    names: Sequence[str]
    keep: bool  # whether the round counts if something disturbs it


def measure(entries: Mapping[str, Sample], policy: Policy | None = None) -> Rounds:
    """Times entries round by round until the policy is satisfied.

    Each entry takes one timed sample and returns seconds per call. An entry that raises, or that returns
    anything but a positive finite number, is dropped; deadlines are the caller's.

    The first blocks are short, so that a large difference costs few rounds although each entry was prepared
    several times. What they leave open gets long blocks, with a look at the results after each
    (`stopping_reason`). A disturbed round is made again, up to TRIES times the wanted rounds;
    `Rounds.choose` decides which rounds count in the end. Where most rounds were disturbed, all of them
    count and none is made
    again: further blocks tell more.
    """
    import scipy.special  # noqa: F401 - a look needs it, and it must not be loaded between samples

    policy = policy or Policy()
    rounds = Rounds()
    for order in orders(list(entries), policy, rounds):
        policy.begin_round()
        seconds, took = _one_round(order.names, entries, rounds.dropped, policy.clock)
        disturbed = policy.end_round()
        rounds.add(Round(order.block, order.round, seconds, disturbed, took), order.keep or not disturbed)
    if not rounds.lasting(entries):
        rounds.stopped = "no entries"
    elif rounds.mostly_disturbed:
        rounds.stopped = "disturbed"
    return rounds


def _one_round(
    names: Sequence[str],
    entries: Mapping[str, Sample],
    dropped: dict[str, str],
    clock: Callable[[], float],
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds per call of each entry, and the seconds that its sample took. An entry that gives no time is
    added to `dropped`; what it took is not taken from the others' budget."""
    seconds, took = {}, {}
    for name in names:
        started = clock()
        try:
            value = entries[name]()
        except Exception as error:
            dropped[name] = str(error) or type(error).__name__
            continue
        if isinstance(value, int | float) and math.isfinite(value) and value > 0:
            seconds[name] = float(value)
            took[name] = clock() - started
        else:
            dropped[name] = f"gave {value!r} as its time"
    return seconds, took


def orders(names: Sequence[str], policy: Policy, rounds: Rounds) -> Iterator[Order]:
    """The orders of all rounds, block by block. Each order follows from what was recorded in `rounds`
    before it. Where this ends, `rounds.stopped` says why."""
    shuffle = random.Random(policy.seed).shuffle
    round_s = preparing_s = 0.0
    for block in range(policy.blocks):
        lasting = rounds.lasting(names)
        if not lasting:
            return
        is_opening = block < policy.opening
        remaining_s = policy.budget_s - rounds.spent_s
        # a later block is worth its preparation if there is time for as many rounds as a first block had,
        # and for as long as the preparation takes.
        worth_s = 0.0 if is_opening else max(policy.first_rounds * round_s, preparing_s)
        if rounds.made and remaining_s < max(rounds.longest_s, worth_s):
            rounds.stopped = "budget"
            return
        started = policy.clock()
        policy.begin_block(block, lasting)
        preparing_s = policy.clock() - started
        blocks_ahead = (policy.opening if is_opening else policy.blocks) - block
        if worth_s:
            blocks_ahead = min(blocks_ahead, int(remaining_s / worth_s))
        end_s = rounds.spent_s + remaining_s / blocks_ahead
        keep = policy.disturbed == "keep" or (
            policy.disturbed == "prefer" and block > 0 and rounds.never_quiet
        )
        wanted = policy.rounds_in(block)
        for index in range(TRIES * wanted):
            if index and rounds.spent_s + round_s > end_s:
                rounds.stopped = "budget"
                break
            shuffled = list(lasting)
            shuffle(shuffled)
            yield Order(block, index, shuffled, keep)
            last = rounds.last
            if last is None or not last.seconds:
                break
            counted = keep or not last.disturbed
            # a slow entry has had its sample if the round counts, or may count in the end.
            had_sample = counted or (index > 0 and policy.disturbed == "prefer")
            lasting = _contending(last, policy) if had_sample else list(last.seconds)
            round_s = sum(last.took[name] for name in lasting)
            if counted:
                wanted -= 1
            if not wanted:
                break
        if _enough(block, names, policy, rounds):
            return


def _contending(last: Round, policy: Policy) -> list[str]:
    """The entries of the block's next round: those that are not far slower than the fastest, unless that
    would be one alone."""
    fastest = min(last.seconds.values())
    fast = [name for name, seconds in last.seconds.items() if seconds <= policy.slow * fastest]
    return fast if len(fast) > 1 else list(last.seconds)


def _enough(block: int, names: Sequence[str], policy: Policy, rounds: Rounds) -> bool:
    """Whether measuring may end after a block, with the reason in `rounds.stopped`."""
    if policy.disturbed == "prefer":
        if rounds.choose(policy.opening):
            return False
    elif rounds.useless:
        return True
    is_last = block + 1 == policy.blocks
    if is_last or len(set(rounds.blocks)) < policy.opening:
        return False
    lasting = rounds.lasting(names)
    series = {name: rounds.series(name) for name in lasting}
    times = {name: [s for s in series[name] if not math.isnan(s)] for name in lasting}
    typical = {name: statistics.median(s) for name, s in times.items() if s and name != policy.rerun}
    # An entry that is slow, and so rarely sampled, is not waited for.
    wanted = [name for name, s in typical.items() if s <= policy.slow * min(typical.values())]
    reason = stopping_reason(
        series,
        rounds.blocks,
        wanted,
        policy.baseline or names[0],
        rerun=policy.rerun,
        confidence=policy.confidence,
        half_width=policy.half_width,
        margin=policy.margin,
    )
    if reason:
        rounds.stopped = reason
    return bool(reason)
