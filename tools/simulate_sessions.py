"""Simulates sessions of two contenders on a disturbed machine and prints what decision rules make of them.

    python -m tools.simulate_sessions --sessions 1000 > results/statistics/README.md

Every rule has the same machine and about as many turns. Ours decides by itself when to end; do_bench, nvbench
and pyperf measure one contender after the other, as people use them.
"""

from __future__ import annotations

import argparse
import math
import secrets
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from harness.statistics import intervals, paired
from harness.statistics.multiple import joint_verdicts
from harness.timing.interleaved import measure
from harness.timing.rounds import Policy, Rounds
from tools.simulated_machine import BUSY, FAMILIES, TURN_S, Family, Machine

NEAR, FAR = 1.01, 1.05
ROUNDS, FEW_ROUNDS = 190, 30  # of 200: what the default policy makes at most
CALL_S = 1e-3


@dataclass(frozen=True)
class Outcome:
    """Of one session: the verdict on the contender that is as fast, or faster; the interval's ends."""

    verdict: str
    low: float = math.nan
    high: float = math.nan
    rounds: int = ROUNDS
    textbook: float = math.nan  # the width of Student's interval over block means of the same samples
    paired: float = math.nan  # of Student's interval over all rounds of the same samples

    def called(self, verdict: str) -> bool:
        return self.verdict == verdict


Rule = Callable[[Family, float, int], Outcome]


def start(family: Family, ratio: float, seed: int, twin: bool = False) -> Machine:
    names = {"slower": ratio * CALL_S, "faster": CALL_S} | ({"slower again": ratio * CALL_S} if twin else {})
    return Machine(family, names, seed)


def rounds(machine: Machine, seed: int, **policy: object) -> Rounds:
    return measure(
        machine.contenders,
        Policy(
            clock=machine.clock,
            begin_block=machine.prepare,
            begin_round=machine.begin_round,
            end_round=machine.end_round,
            seed=seed,
            budget_s=1e9,
            **policy,
        ),
    )


def default(family: Family, ratio: float, seed: int) -> Outcome:
    """`measure` and `compare`, with nothing said."""
    return compared(rounds(start(family, ratio, seed), seed))


def with_floor(family: Family, ratio: float, seed: int) -> Outcome:
    """As `harness run` does it: an A/A pair in the same rounds gives the floor."""
    found = rounds(start(family, ratio, seed, twin=True), seed, twin="slower again")
    names = ("slower", "faster", "slower again")
    series = {name: found.series(name) for name in names}
    judged = joint_verdicts(series, found.blocks, names[:2], names[0], twin=names[2])[0].comparison
    return Outcome(judged.verdict, judged.low, judged.high, len(found.rounds))


def fixed(family: Family, ratio: float, seed: int) -> Outcome:
    """Without looking: 5 blocks of equal length."""
    return compared(rounds(start(family, ratio, seed), seed, blocks=5, max_rounds=ROUNDS // 5))


def looking_always(family: Family, ratio: float, seed: int) -> Outcome:
    """What sequential stopping must not be: Student's interval over rounds after every fifth, until it
    excludes 1."""
    found = rounds(start(family, ratio, seed), seed, blocks=10, max_rounds=ROUNDS // 10, half_width=0)
    logs = log_ratios(found)
    for n in range(10, ROUNDS + 1, 5):
        outcome = student(logs[:n])
        if outcome.verdict != "unclear":
            break
    return outcome


def medians_of_blocks(family: Family, ratio: float, seed: int) -> Outcome:
    """Student's interval over the medians of 5 blocks, and the A/A interval's reach as floor: ours before."""
    found = rounds(
        start(family, ratio, seed, twin=True), seed, blocks=5, max_rounds=ROUNDS // 5, half_width=0
    )
    pair, twins = (student(block_centres(found, a, "slower", np.median)) for a in ("faster", "slower again"))
    floor = max(abs(twins.low - 1), abs(twins.high - 1))
    verdict = paired.verdict(pair.low, pair.high, floor=floor)
    return Outcome(verdict, pair.low, pair.high)


def rounds_student(family: Family, ratio: float, seed: int) -> Outcome:
    """Student's interval over all paired rounds, preparations ignored."""
    return student(log_ratios(rounds(start(family, ratio, seed), seed, blocks=5, max_rounds=ROUNDS // 5)))


def one_by_one(family: Family, ratio: float, seed: int, processes: int, n: int) -> list[np.ndarray]:
    """Seconds of each contender, one after the other, each prepared so many times."""
    machine = start(family, ratio, seed)
    samples = []
    for name in ("faster", "slower"):
        taken = []
        for process in range(processes):
            machine.prepare(process)
            taken += [machine.turn(name) for _ in range(n // processes)]
        samples.append(np.array(taken))
    return samples


def do_bench(family: Family, ratio: float, seed: int) -> Outcome:
    """triton.testing.do_bench: the median of N; whose is smaller is called faster."""
    fast, slow = (np.median(s) for s in one_by_one(family, ratio, seed, 1, ROUNDS))
    return Outcome("faster" if fast < slow else "slower")


def do_bench_1_percent(family: Family, ratio: float, seed: int) -> Outcome:
    """The same, where people let differences of up to 1 % pass as noise."""
    fast, slow = (np.median(s) for s in one_by_one(family, ratio, seed, 1, ROUNDS))
    return Outcome(beyond(slow / fast, 0.01))


def nvbench(family: Family, ratio: float, seed: int) -> Outcome:
    """nvbench: at least 10 samples and 0.5 s, until the relative deviation is below 0.5 %, or stays within
    5 % of itself over 64 samples; nvbench_compare: different if by more than the smaller deviation."""
    machine = start(family, ratio, seed)
    machine.prepare(0)
    means, noises, most = [], [], 0
    for name in ("faster", "slower"):
        taken: list[float] = []
        history: list[float] = []
        while len(taken) < ROUNDS:
            taken.append(machine.turn(name))
            if len(taken) < max(10, 0.5 / TURN_S):
                continue
            noise = statistics.stdev(taken) / statistics.fmean(taken)
            history.append(noise)
            window = history[-64:]
            stable = len(history) > 64 and statistics.stdev(window) < 0.05 * statistics.fmean(window)
            if noise < 0.005 or (stable and len(history) % 16 == 0):
                break
        means.append(statistics.fmean(taken))
        noises.append(statistics.stdev(taken) / statistics.fmean(taken))
        most = max(most, len(taken))
    difference = means[1] / means[0] - 1
    within = abs(difference) <= min(noises)
    return Outcome("same" if within else "faster" if difference > 0 else "slower", rounds=most)


def pyperf(family: Family, ratio: float, seed: int) -> Outcome:
    """pyperf compare_to: 20 processes each, mean and deviation; significant by Student's two-sample test."""
    from scipy.stats import ttest_ind

    fast, slow = one_by_one(family, ratio, seed, 19, ROUNDS)
    if ttest_ind(slow, fast).pvalue >= 0.05:
        return Outcome("unclear")
    return Outcome("faster" if fast.mean() < slow.mean() else "slower")


def beyond(ratio: float, margin: float) -> str:
    return "same" if abs(ratio - 1) <= margin else "faster" if ratio > 1 else "slower"


def log_ratios(found: Rounds) -> np.ndarray:
    return np.log(np.array(found.series("slower")) / np.array(found.series("faster")))


def block_centres(found: Rounds, a: str, b: str, centre: Callable) -> np.ndarray:
    logs = np.log(np.array(found.series(b)) / np.array(found.series(a)))
    blocks = np.array(found.blocks)
    return np.array([centre(logs[blocks == block]) for block in np.unique(blocks)])


def half_width(values: np.ndarray) -> float:
    n = len(values)
    return float(intervals.students_t(n - 1, intervals.CONFIDENCE) * values.std(ddof=1) / math.sqrt(n))


def student(values: np.ndarray) -> Outcome:
    mean, half = float(values.mean()), half_width(values)
    low, high = math.exp(mean - half), math.exp(mean + half)
    verdict = "faster" if low > 1 else "slower" if high < 1 else "unclear"
    return Outcome(verdict, low, high, len(values))


def compared(found: Rounds) -> Outcome:
    """What `compare` makes of it."""
    c = paired.compare(found.series("faster"), found.series("slower"), blocks=found.blocks)
    means = block_centres(found, "faster", "slower", np.mean)
    return Outcome(
        c.verdict, c.low, c.high, len(found.rounds), 2 * half_width(means), 2 * half_width(log_ratios(found))
    )


RULES: dict[str, Rule] = {
    "**ours**, defaults": default,
    "**ours**, with an A/A floor": with_floor,
    "ours, 5 equal blocks, no looks": fixed,
    "5 blocks' medians, A/A reach as floor": medians_of_blocks,
    "Student over rounds, fixed": rounds_student,
    "Student over rounds, a look every 5": looking_always,
    "do_bench: medians": do_bench,
    "do_bench: medians, 1 % margin": do_bench_1_percent,
    "nvbench": nvbench,
    "pyperf": pyperf,
}


@dataclass
class Row:
    """Percentages over the sessions of one rule and family."""

    false: float
    covered: float
    near: float
    far: float
    rounds: tuple[float, float, float]
    width: float  # of the interval, over that of Student's over block means
    paired: float  # over that of Student's over all rounds


def run(rule_name: str, family_name: str, sessions: int, seed: int) -> Row:
    rule, family = RULES[rule_name], (FAMILIES | BUSY)[family_name]
    by_ratio = {
        ratio: [rule(family, ratio, seed + place) for place in range(sessions)] for ratio in (1.0, NEAR, FAR)
    }
    same, near, far = by_ratio.values()

    def share(found: list[bool]) -> float:
        return 100 * sum(found) / sessions

    return Row(
        false=share([not o.called("same") and not o.called("unclear") for o in same]),
        covered=min(share([o.low <= r <= o.high for o in found]) for r, found in by_ratio.items())
        if not math.isnan(same[0].low)
        else math.nan,
        near=share([o.called("faster") for o in near]),
        far=share([o.called("faster") for o in far]),
        rounds=tuple(statistics.fmean(o.rounds for o in found) for found in by_ratio.values()),
        width=statistics.fmean(o.high - o.low for o in same) / statistics.fmean(o.textbook for o in same),
        paired=statistics.fmean(o.high - o.low for o in same) / statistics.fmean(o.paired for o in same),
    )


def summary(found: dict[str, dict[str, Row]]) -> str:
    """A row per rule, the families taken together."""
    headers = [
        "rule",
        "false, worst family",
        "false, mean",
        "intervals hold, worst",
        "1 % found, no offsets",
        "5 % found",
        "rounds at 0 / 1 / 5 %",
    ]
    rows = []
    for name, by_family in found.items():
        all_of_them = list(by_family.values())
        no_offsets = [row for family, row in by_family.items() if not FAMILIES[family].offset]
        rounds_made = [
            statistics.fmean(made) for made in zip(*(row.rounds for row in all_of_them), strict=True)
        ]
        rows.append(
            [
                name,
                number(max(row.false for row in all_of_them)),
                number(statistics.fmean(row.false for row in all_of_them)),
                number(min(row.covered for row in all_of_them)),
                number(statistics.fmean(row.near for row in no_offsets)),
                number(statistics.fmean(row.far for row in all_of_them)),
                " / ".join(f"{made:.0f}" for made in rounds_made),
            ]
        )
    return "## All families together, %\n\n" + table(headers, rows)


def table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] + ["---:"] * (len(headers) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float, digits: int = 1) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="fresh and printed unless given")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else secrets.randbelow(10**9)
    pairs = [(rule, family) for rule in RULES for family in FAMILIES]
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = pool.map(run, *zip(*pairs, strict=True), repeat(options.sessions), repeat(seed))
        found: dict[str, dict[str, Row]] = {rule: {} for rule in RULES}
        for (rule, family), row in zip(pairs, rows, strict=True):
            found[rule][family] = row
            print(f"{rule}: {family}", file=sys.stderr)
    print(report(found, options.sessions, seed))


def report(found: dict[str, dict[str, Row]], sessions: int, seed: int) -> str:
    families = list(FAMILIES)
    parts = [HEAD.format(sessions=sessions, seed=seed), summary(found)]
    for title, get in (
        ("False verdicts: `faster` or `slower` of equal contenders, %", lambda r: r.false),
        ("A 1 % difference found, %", lambda r: r.near),
        ("A 5 % difference found, %", lambda r: r.far),
        ("Intervals that hold the truth, % (the worst of 0, 1 and 5 %)", lambda r: r.covered),
    ):
        rows = [[name, *(number(get(by_family[f])) for f in families)] for name, by_family in found.items()]
        rows = [row for row in rows if any(row[1:])]
        parts.append(f"## {title}\n\n" + table(["rule", *families], rows))
    rows = [
        [name, *(" / ".join(f"{n:.0f}" for n in by_family[f].rounds) for f in families)]
        for name, by_family in found.items()
    ]
    parts.append("## Rounds on average, 0 / 1 / 5 % apart\n\n" + table(["rule", *families], rows))
    by_family = next(iter(found.values()))
    rows = [
        [name, *(number(get(by_family[f]), 2) for f in families)]
        for name, get in (("over blocks' means", lambda r: r.width), ("over all rounds", lambda r: r.paired))
    ]
    title = "Width of our default interval, over that of Student's of the same samples"
    parts.append(f"## {title}\n\n" + table(["Student's", *families], rows))
    return "\n\n".join(parts)


HEAD = """# What decision rules make of a disturbed machine

Printed by `python -m tools.simulate_sessions --sessions {sessions} --seed {seed}` (without `--seed` it
draws a fresh one): {sessions} simulated sessions per rule, family and true difference.
`tools/simulated_machine.py` says what disturbs the machine. Every sample has 2 % noise of its own (0.3 % in
the last family); in the families with offsets every preparation moves each contender by 0.5 %.

The rules of do_bench, nvbench and pyperf are written from their descriptions, not run from their
sources. Our own rule's constants were chosen on these same families; only the seed is fresh."""


if __name__ == "__main__":
    main()
