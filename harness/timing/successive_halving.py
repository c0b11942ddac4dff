"""Successive halving: the fastest of many entries is found in elimination rounds and then measured.

The winner among many is flattered by the noise that made it win. So eliminations only choose: the ratio and
the verdict rest on rounds that are made after them, of the baseline, its rerun and the challenger alone,
all prepared anew. Among 32 entries that are all as fast as the baseline one always wins the eliminations;
it is then called faster no more often than an entry that was named beforehand
(tests/harness/timing/test_successive_halving.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from harness.statistics.multiple import Series, log_time
from harness.statistics.paired import compare
from harness.timing.rounds import Policy, Rounds, Sampler, measure

SELECTING = 0.6  # the largest share of the budget that eliminations take
BLOCKS = 3  # blocks of one elimination: fewer leave Student's t too wide to drop any entry
FIRST_ROUNDS = 2  # rounds in each block of the first elimination; each later one has twice as many


def halving(samples: Mapping[str, Sampler], policy: Policy) -> Rounds:
    """Like `harness.timing.measure`, for the single question whether any entry is faster than the baseline.

    The eliminations share SELECTING of the budget. After each, those rivals of the baseline stay that the
    rounds so far cannot tell from the best one: all of them as far as the budget and `policy.max_rounds`
    allow, at most the better half otherwise (successive halving: Karnin, Koren and Somekh 2013, ICML;
    Jamieson and Talwalkar 2016, AISTATS). The last one is measured beside the baseline like any two
    entries. Where it fails, the next best takes its place; where the baseline fails, there is nothing to
    measure.

    The result has the elimination rounds in `eliminations`, and in `rounds` those that came after them.
    """
    baseline = policy.baseline or next(iter(samples))
    rivals = [name for name in samples if name not in (baseline, policy.rerun)]
    measured, rounds = Rounds(), FIRST_ROUNDS
    beaten: dict[str, str] = {}
    while len(rivals) > 1:
        elimination = replace(
            policy,
            blocks=BLOCKS,
            first_rounds=rounds,
            max_rounds=rounds,
            half_width=0.0,
            baseline=baseline,
            rerun=None,
            budget_s=_share(policy, measured, rivals),
            seed=policy.seed + measured.next_block,
        )
        made = measure({name: samples[name] for name in (baseline, *rivals)}, elimination)
        chosen = [replace(r, use="elimination") if r.use == "counts" else r for r in made.made]
        measured = measured.then(replace(made, made=chosen))
        if baseline in measured.dropped or measured.useless:
            return replace(measured, beaten=beaten, stopped="disturbed" if measured.useless else "no entries")
        rounds = min(2 * rounds, policy.max_rounds)
        sample_s = made.spent_s / max(1, sum(len(r.seconds) for r in made.made))
        room = 0.0
        if rounds > elimination.max_rounds:
            share_s = _share(policy, measured, rivals)
            room = share_s / (BLOCKS * rounds * sample_s) - 1 if sample_s else math.inf
        rivals, out = _halved(measured, baseline, rivals, room)
        beaten = out | beaten
    for challenger in [*rivals, *beaten] or [baseline]:
        beaten.pop(challenger, None)
        names = dict.fromkeys(
            n for n in (baseline, policy.rerun, challenger) if n is not None and n in samples
        )
        rest = replace(policy, baseline=baseline, budget_s=policy.budget_s - measured.spent_s)
        measured = measured.then(measure({name: samples[name] for name in names}, rest))
        if challenger not in measured.dropped or baseline in measured.dropped:
            break
    return replace(measured, beaten=beaten)


def _share(policy: Policy, measured: Rounds, rivals: Sequence[str]) -> float:
    """Seconds for the next elimination: what eliminations may still take, divided by the number of
    eliminations that halving these rivals takes."""
    return (SELECTING * policy.budget_s - measured.spent_s) / math.ceil(math.log2(max(2, len(rivals))))


def _halved(
    measured: Rounds, baseline: str, rivals: Iterable[str], room: float
) -> tuple[list[str], dict[str, str]]:
    """The rivals that stay, best first, and for each of the others the words for its defeat.

    room: how many rivals the next elimination has time for; at least half of them stay. Once the baseline is
    clearly faster than the best rival, one stays: which one no longer matters
    """
    blocks = [r.block for r in measured.eliminations]
    series: Series = {
        name: [r.seconds.get(name, math.nan) for r in measured.eliminations] for name in (baseline, *rivals)
    }

    def time(name: str) -> float:
        return log_time(series[name], blocks) if any(s == s for s in series[name]) else math.inf

    ranked = sorted((name for name in rivals if name not in measured.dropped), key=time)
    if not ranked:
        return [], {}
    best = ranked[0]
    against = {name: compare(series[best], series[name], blocks=blocks) for name in (baseline, *ranked)}
    room = 1 if against[baseline].verdict == "slower" else max(room, math.ceil(len(ranked) / 2))
    reaching = [name for name in ranked if name == best or against[name].verdict == "unclear"]
    on = [name for place, name in enumerate(ranked) if place < room and name in reaching]
    lost = {}
    for name in ranked:
        ratio, low, high = against[name].ratio, against[name].low, against[name].high
        if name in on:
            continue
        if math.isnan(ratio):
            lost[name] = f"beaten in the eliminations, without a round together with {best}"
        else:
            times = f"{ratio:.3f}x ({low:.3f} to {high:.3f})"
            lost[name] = f"beaten in the eliminations: {times} the time of {best}"
    return on, lost
