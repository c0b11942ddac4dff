"""Successive halving: the fastest of many entries, found in elimination rounds (eliminations), then measured.

The winner of many is flattered by the noise that made it win. So eliminations only choose: the ratio and the
verdict
rest on rounds made after them, of the baseline, its rerun and the challenger alone, all prepared anew. Among
32 entries that are all as fast as the baseline somebody always wins the eliminations, and is then called
faster no more often than one that was named beforehand (tests/harness/timing/test_successive_halving.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from harness.statistics.multiple import Series, log_time
from harness.statistics.paired import Comparison, compare
from harness.timing.interleaved import measure
from harness.timing.rounds import Policy, Rounds, Sample

SELECTING = 0.6  # of the budget, at most
BLOCKS = 3  # of a heat: fewer leave Student's t too wide to drop anybody
FIRST_ROUNDS = 2  # in each block of the first heat; in those of the next one twice as many


def halving(samples: Mapping[str, Sample], policy: Policy) -> Rounds:
    """As `harness.timing.measure`, for the one question whether anybody is faster than the baseline.

    The eliminations share SELECTING of the budget. After each, those of the baseline's rivals go on whom the
    rounds so
    far do not tell from the best: all of them as far as budget and `policy.max_rounds` go, the better half at
    any rate (successive halving: Karnin, Koren and Somekh 2013, ICML; Jamieson and Talwalkar 2016, AISTATS).
    The one that is left is measured beside the baseline as any two entries are. Where it fails, the next
    best takes its place; where the baseline fails, there is nothing to measure.

    What is returned has the eliminations in `eliminations`, and in `rounds` what came after them.
    """
    baseline = policy.baseline or next(iter(samples))
    rivals = [name for name in samples if name not in (baseline, policy.rerun)]
    measured, rounds = Rounds(), FIRST_ROUNDS
    beaten: dict[str, str] = {}
    while len(rivals) > 1:
        heat = replace(
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
        made = measure({name: samples[name] for name in (baseline, *rivals)}, heat)
        measured = measured.then(replace(made, eliminations=made.rounds, rounds=[]))
        if baseline in measured.dropped or measured.useless:
            return replace(measured, beaten=beaten, stopped="disturbed" if measured.useless else "no entries")
        rounds = min(2 * rounds, policy.max_rounds)
        sample_s = made.spent_s / max(1, sum(len(r.seconds) for r in made.all))
        room = _share(policy, measured, rivals) / (BLOCKS * rounds * sample_s) - 1 if sample_s else math.inf
        rivals, out = _halved(measured, baseline, rivals, room if rounds > heat.max_rounds else 0)
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
    """Seconds of a heat of these rivals, if as many eliminations follow as halving takes."""
    return (SELECTING * policy.budget_s - measured.spent_s) / math.ceil(math.log2(max(2, len(rivals))))


def _halved(
    measured: Rounds, baseline: str, rivals: Iterable[str], room: float
) -> tuple[list[str], dict[str, str]]:
    """Who goes on, and by whom the others are beaten, both from the best. The next heat has room for so many
    rivals, if that is more than half of them; once the baseline is clearly faster than the best of them,
    which one that is no longer matters."""
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
    return on, {name: _lost(against[name], best) for name in ranked if name not in on}


def _lost(comparison: Comparison, best: str) -> str:
    if math.isnan(comparison.ratio):
        return f"beaten in the eliminations, without a round together with {best}"
    times = f"{comparison.ratio:.3f}x ({comparison.low:.3f}..{comparison.high:.3f})"
    return f"beaten in the eliminations: {times} the time of {best}"
