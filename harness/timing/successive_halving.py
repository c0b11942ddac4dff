"""Successive halving: the fastest of many entries is found in elimination rounds and then measured.

The winner among many seems faster than it is, because noise helped it to win. So eliminations only choose a
challenger. The ratio and the verdict rest on rounds that are made after them, of the baseline, its rerun and
the challenger alone, all prepared anew. Among 32 entries that are all as fast as the baseline one always wins
the eliminations; it is then called faster no more often than an entry that was named beforehand
(tests/harness/timing/test_successive_halving.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from harness.statistics.multiple import Series, log_time
from harness.statistics.paired import compare
from harness.timing.rounds import Policy, Rounds, Sampler, is_given_up, measure

SELECTING = 0.6  # the largest share of the budget that eliminations take
BLOCKS = 3  # blocks of one elimination: fewer leave Student's t too wide to drop any entry
FIRST_ROUNDS = 2  # rounds in each block of the first elimination; each later elimination has twice as many


def halving(samples: Mapping[str, Sampler], policy: Policy) -> Rounds:
    """Like `harness.timing.measure`, for the single question whether any entry is faster than the baseline.

    The eliminations share SELECTING of the budget. After each, those rivals of the baseline stay that the
    rounds so far cannot tell from the best one: all of them as far as the budget and `policy.max_rounds`
    allow, at most the better half otherwise (successive halving: Karnin, Koren and Somekh 2013, ICML;
    Jamieson and Talwalkar 2016, AISTATS). The one that is left, the challenger, is measured beside the
    baseline. Where it fails, the next best takes its place; where the baseline fails, nothing is measured.

    The result has the elimination rounds in `eliminations`, and in `rounds` those that came after them.
    """
    baseline = policy.baseline or next(iter(samples))  # the first entry by default, as for `measure`
    rivals = [name for name in samples if name not in (baseline, policy.rerun)]
    measured = Rounds()
    block_rounds = FIRST_ROUNDS
    beaten: dict[str, str] = {}  # the rivals that lost, the best first, with the words for their defeat
    while len(rivals) > 1:
        elimination = replace(
            policy,
            blocks=BLOCKS,
            first_rounds=block_rounds,
            max_rounds=block_rounds,
            half_width=0.0,
            baseline=baseline,
            rerun=None,
            budget_s=_share_s(policy, measured, rivals),
            seed=policy.seed + measured.next_block,
        )
        new = measure({name: samples[name] for name in (baseline, *rivals)}, elimination)
        made = [replace(r, use="elimination") if r.use == "counts" else r for r in new.made]
        measured = measured.then(replace(new, made=made))
        if is_given_up(len(measured.left_out), len(measured.made)):
            return replace(measured, beaten=beaten, stopped="disturbed")
        if baseline in measured.dropped:
            return replace(measured, beaten=beaten, stopped="no entries")
        block_rounds = min(2 * block_rounds, policy.max_rounds)
        # For how many rivals the budget allows the next elimination. It would hardly tell more rivals apart
        # where it has no more rounds than this one. Then the better half is enough: 0.
        affordable = 0.0
        if block_rounds > elimination.max_rounds:
            samples_made = sum(len(r.seconds) for r in new.made)
            entry_s = BLOCKS * block_rounds * new.spent_s / max(1, samples_made)
            entries = _share_s(policy, measured, rivals) / entry_s if entry_s else math.inf
            affordable = entries - 1  # one of them is the baseline
        rivals, lost = _halved(measured, baseline, rivals, affordable)
        beaten = lost | beaten
    challengers = [*rivals, *beaten] or [baseline]  # without rivals the baseline and its rerun are measured
    for challenger in challengers:
        beaten.pop(challenger, None)
        final = replace(policy, baseline=baseline, budget_s=policy.budget_s - measured.spent_s)
        names = (baseline, policy.rerun, challenger)
        finalists = {name: samples[name] for name in names if name is not None and name in samples}
        measured = measured.then(measure(finalists, final))
        if challenger not in measured.dropped or baseline in measured.dropped:
            break
    return replace(measured, beaten=beaten)


def _share_s(policy: Policy, measured: Rounds, rivals: Sequence[str]) -> float:
    """Seconds for the next elimination: what eliminations have left, divided by the number still to come."""
    return (SELECTING * policy.budget_s - measured.spent_s) / math.ceil(math.log2(max(2, len(rivals))))


def _halved(
    measured: Rounds, baseline: str, rivals: Iterable[str], affordable: float
) -> tuple[list[str], dict[str, str]]:
    """The rivals that stay, the best first, and how each other one lost. Dropped rivals are in neither.

    affordable: how many rivals may stay; the better half may stay in any case
    """
    blocks = [r.block for r in measured.eliminations]
    series: Series = {
        name: [r.seconds.get(name, math.nan) for r in measured.eliminations] for name in (baseline, *rivals)
    }

    def time(name: str) -> float:
        return math.inf if all(map(math.isnan, series[name])) else log_time(series[name], blocks)

    ranked = sorted(measured.lasting(rivals), key=time)
    if not ranked:
        return [], {}
    best = ranked[0]
    against_best = {name: compare(series[best], series[name], blocks=blocks) for name in (baseline, *ranked)}
    if against_best[baseline].verdict == "slower":
        most = 1.0  # The baseline has won, so it no longer matters which rival is measured beside it.
    else:
        most = max(affordable, math.ceil(len(ranked) / 2))
    staying = []
    lost = {}
    for place, name in enumerate(ranked):
        compared = against_best[name]
        if name == best or (place < most and compared.verdict == "unclear"):
            staying.append(name)
        elif math.isnan(compared.ratio):
            lost[name] = f"beaten in the eliminations, without a round together with {best}"
        else:
            times = f"{compared.ratio:.3f}x ({compared.low:.3f} to {compared.high:.3f})"
            lost[name] = f"beaten in the eliminations: {times} the time of {best}"
    return staying, lost
