"""Interleaved measuring: entries timed in turn, in rounds of fresh random order."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Collection, Mapping

from harness.statistics.multiple import stopping_reason
from harness.timing.rounds import Policy, Round, Rounds, Sample

# Rounds that a block may try for each that it wants: disturbed ones are made again, while most are quiet.
TRIES = 2


def measure(entries: Mapping[str, Sample], policy: Policy | None = None) -> Rounds:
    """Times the entries round by round.

    Each entry performs one timed sample and returns seconds per call. One that raises, or returns
    anything but a positive finite number, is dropped; deadlines are the caller's.

    The first blocks are short, so that a large difference costs few rounds and yet every entry was
    prepared several times. What they leave open gets long blocks, a look after each (`stopping_reason`).
    A disturbed round is made again, as far as TRIES goes; `Rounds.choose` says which ones count in the end.
    Where most rounds were disturbed, all count and none is made again: more blocks say more.
    """
    import scipy.special  # noqa: F401 - a look needs it, and shall not load it between samples

    policy = policy or Policy()
    order = random.Random(policy.seed)
    active = dict(entries)
    result = Rounds()
    longest_round = round_s = preparing_s = 0.0
    for block in range(policy.blocks):
        if not active:
            break
        remaining = policy.budget_s - result.spent_s
        opening = block < policy.opening
        # Of what is left over, a block gets as many rounds as a first one had, and as long as preparing it
        # takes, or it is not worth that.
        worth_s = 0.0 if opening else max(policy.first_rounds * round_s, preparing_s)
        if result.made and remaining < max(longest_round, worth_s):
            result.stopped = "budget"
            break
        preparing_s = -policy.clock()
        policy.begin_block(block, list(active))
        preparing_s += policy.clock()
        ahead = (policy.opening if opening else policy.blocks) - block
        if worth_s:
            ahead = min(ahead, int(remaining / worth_s))
        block_end = result.spent_s + remaining / ahead
        contending, expected_s = active, 0.0
        wanted = policy.rounds_in(block)
        never_quiet = policy.disturbed == "prefer" and bool(block) and result.never_quiet
        for index in range(TRIES * wanted):
            if not wanted:
                break
            if index and result.spent_s + expected_s > block_end:
                result.stopped = "budget"
                break
            policy.begin_round()
            seconds, took = _one_round(contending, order, result.dropped, policy.clock)
            disturbed = policy.end_round()
            longest_round = max(longest_round, sum(took.values()))
            result.spent_s += sum(took.values())
            counts = policy.disturbed == "keep" or never_quiet or not disturbed
            (result.rounds if counts else result.disturbed).append(Round(block, index, seconds, disturbed))
            active = {name: sample for name, sample in active.items() if name not in result.dropped}
            if not seconds:
                break
            wanted -= counts
            # Who is slow had its sample only if the round counts, as a second one may after all.
            had_sample = counts or (index and policy.disturbed == "prefer")
            fastest = min(seconds.values()) if had_sample else math.inf
            fast = [name for name in seconds if seconds[name] <= policy.slow * fastest]
            contending = {name: active[name] for name in (fast if len(fast) > 1 else seconds)}
            expected_s = round_s = sum(took[name] for name in contending)
        if policy.disturbed == "prefer":
            if result.choose(policy.opening):
                continue
        elif result.useless:
            break
        if policy.opening <= len(set(result.blocks)) and block + 1 < policy.blocks:
            reason = _look(result, active, policy.baseline or next(iter(entries)), policy)
            if reason:
                result.stopped = reason
                break
    if not active:
        result.stopped = "no entries"
    elif result.mostly_disturbed:
        result.stopped = "disturbed"
    return result


def _look(result: Rounds, active: Collection[str], baseline: str, policy: Policy) -> str:
    """Why measuring may end; who is slow and rarely measured is not waited for."""
    series = {name: result.series(name) for name in active}
    times = {name: [s for s in series[name] if s == s] for name in series}
    typical = {n: statistics.median(s) for n, s in times.items() if s and n != policy.rerun}
    wanted = [name for name in typical if typical[name] <= policy.slow * min(typical.values())]
    return stopping_reason(
        series,
        result.blocks,
        wanted,
        baseline,
        rerun=policy.rerun,
        confidence=policy.confidence,
        half_width=policy.half_width,
        margin=policy.margin,
    )


def _one_round(
    contending: Mapping[str, Sample],
    order: random.Random,
    dropped: dict[str, str],
    clock: Callable[[], float],
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds per call of each entry, and the seconds that its sample took. What an entry wasted
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
