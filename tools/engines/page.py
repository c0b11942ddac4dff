"""The page of a comparison, from its journal alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.report.text import table
from tools.control_kernels import HANDICAP
from tools.engines.callables import AGAIN, KERNELS, SLOWER
from tools.engines.journal import Ranked, Session
from tools.engines.one_ranking import ENGINES, LOADS, OURS
from tools.engines.verdicts import NEAR, by_estimate

TITLES = {"quiet": "Quiet", "busy": "Beside a busy loop on each core"}
LIMIT = 2.0
"""Times the fastest engine's seconds that ours may take."""

RULES = {
    "ours": (
        "`harness.timing.measure` as `harness run` uses it, with so many seconds for turns at most: rounds "
        "of interleaved turns, blocks that prepare anew",
        "the paired interval over blocks lies beyond the floor of an A/A pair (`joint_verdicts`, all "
        "together 95 % sure)",
    ),
    "torch.utils.benchmark": (
        "`Timer.adaptive_autorange` with its defaults (torch/utils/benchmark/utils/timer.py)",
        "`Compare`'s colours: a median within 1 % of the best has the best's; and its warning: an "
        "interquartile range above 10 %, `(! 23%)`, makes smaller differences `unclear` "
        "(utils/compare.py, utils/common.py)",
    ),
    "pytest-benchmark": (
        "a session with its defaults: calibrated, 1 s for each callable",
        "`--benchmark-compare-fail=median:1%`, either of the two as the saved one",
    ),
    "pyperf": (
        "`Runner.bench_func` with `--fast`: 10 processes, 2 values from each",
        "`compare_to`: Student's t-test of the values, 95 %",
    ),
    "do_bench": (
        "its rule on the CPU's clock (triton/testing.py): 25 ms of warm-up, 100 ms of calls, the last-level "
        "cache cleared before each",
        f"none of its own: medians at least {NEAR:.0%} apart",
    ),
}


@dataclass(frozen=True)
class Score:
    """Of one engine under one load.

    seconds: to a verdict, of each ranking
    false:   equal pairs called different, by its own rule and by estimates at least 1 % apart
    found:   slower ones called slower, likewise
    wrong:   slower ones called faster
    failed:  rankings that ended with an error, in no other figure
    """

    engine: str
    seconds: Sequence[float]
    false: tuple[int, int]
    found: tuple[int, int]
    wrong: int
    failed: int

    @property
    def rankings(self) -> int:
        return len(self.seconds)

    @property
    def typical_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def net(self) -> float:
        """Right verdicts less false ones, for each ranking: 1 is perfect, 0 is what silence gets, and chance
        gets less."""
        return (self.found[0] - self.wrong - self.false[0]) / self.rankings


def score(engine: str, ranked: Iterable[Ranked]) -> Score:
    """Of rankings of one load."""
    mine = [r for r in ranked if r.engine == engine]
    made = [r for r in mine if not r.error]
    own = [r.verdicts for r in made]
    estimated: list[Mapping[str, str]] = [by_estimate(r.seconds, r.baseline) for r in made]

    def count(rule: Sequence[Mapping[str, str]], variant: str, *wanted: str) -> int:
        return sum(
            verdicts[f"{r.baseline} {variant}"] in wanted for r, verdicts in zip(made, rule, strict=True)
        )

    return Score(
        engine,
        seconds=[r.wall_s for r in made],
        false=(count(own, AGAIN, "faster", "slower"), count(estimated, AGAIN, "faster", "slower")),
        found=(count(own, SLOWER, "slower"), count(estimated, SLOWER, "slower")),
        wrong=count(own, SLOWER, "faster"),
        failed=len(mine) - len(made),
    )


def page(command: str, sessions: Sequence[Session], ranked: Sequence[Ranked]) -> str:
    return "\n\n".join([*_head(command, sessions, ranked), *_results(ranked), _rules()]) + "\n"


def _head(command: str, sessions: Sequence[Session], ranked: Sequence[Ranked]) -> Iterator[str]:
    last = sessions[-1]
    machine = last.machine
    yield "# Five engines on the same callables"
    yield (
        f"Printed by `{command}` from [rankings.jsonl](rankings.jsonl): {machine['device']} "
        f"({machine['arch']}, {machine['cpus']} CPUs), {last.settings.threads} threads, "
        f"{machine['os']}; {', '.join(f'{name} {v}' for name, v in last.versions.items())}; commit "
        f"{' and '.join(dict.fromkeys(session.commit for session in sessions))}; {sessions[0].began}; "
        f"{sum(r.wall_s for r in ranked) / 60:.0f} minutes."
    )
    if last.settings.quick:
        yield (
            "**A quick trial of the program, no measurement:** shorter budgets of ours, fewer processes of "
            "pyperf's, and rankings without the two other kernels."
        )
    yield (
        "A ranking is one process of one engine that ranks a baseline, the same prepared again in fresh "
        f"buffers, the same with {HANDICAP:.0%} of each call's own time added to it, and the two other "
        "kernels. Seconds are from the start of the process to its end, importing torch included. The "
        "score is right verdicts less false ones, for each ranking: 1 where every 2 % is found and no equal "
        "pair is told apart, 0 for saying nothing, less than that for guessing. "
        "Kernels, each in turn the baseline:"
    )
    yield "\n".join(f"- {name}: {kernel}" for name, kernel in KERNELS.items())


def _results(ranked: Sequence[Ranked]) -> Iterator[str]:
    conclusions: list[str] = []
    for load in LOADS:
        of_load = [r for r in ranked if r.load == load]
        scores = [s for engine in ENGINES if (s := score(engine, of_load)).rankings or s.failed]
        if not scores:
            continue
        yield f"## {TITLES[load]}"
        yield _table(scores)
        others = [r.others for r in of_load]
        yield (
            f"Other processes meanwhile kept {statistics.median(others):.2f} CPUs busy in the median, "
            f"{max(others):.2f} at most."
        )
        for failure in (r for r in of_load if r.error):
            yield f"{failure.engine}, ranking {failure.ranking + 1}, failed: {failure.error}."
        conclusions += _conclusions(load, scores)
    yield "## Ours beside the others"
    yield "\n".join(conclusions)


def _table(scores: Sequence[Score]) -> str:
    rows = [
        [
            s.engine,
            str(s.rankings),
            _seconds(s.seconds),
            f"{s.false[0]} of {s.rankings}",
            f"{s.found[0]} of {s.rankings}",
            str(s.wrong),
            f"{s.net:+.2f}" if s.rankings else "",
            f"{s.false[1]}, {s.found[1]}",
        ]
        for s in scores
    ]
    headers = [
        "engine", "rankings", "seconds, median (range)", "false verdicts on equal pairs", "2 % found",
        "2 % the wrong way", "score", "false and found by estimates 1 % apart",
    ]  # fmt: skip
    return table(rows, headers, right=headers[1:], style="github")


def _seconds(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f}..{max(seconds):.1f})"


def _conclusions(load: str, scores: Sequence[Score]) -> Iterator[str]:
    """Whether ours is best in truth and within twice the fastest in time, in words."""
    peers = [s for s in scores if s.rankings and s.engine not in OURS]
    if not peers:
        return
    best = max(peers, key=lambda s: s.net)
    fastest = min(peers, key=lambda s: s.typical_s)
    for ours in (s for s in scores if s.rankings and s.engine in OURS):
        truth = (
            "best" if ours.net > best.net else "as good as the best" if ours.net == best.net else "NOT best"
        )
        times = ours.typical_s / fastest.typical_s
        within = "within" if times <= LIMIT else "NOT within"
        yield (
            f"- {TITLES[load]}, {ours.engine}: {truth} in truth, {ours.net:+.2f} ({best.engine} "
            f"{best.net:+.2f}); {within} {LIMIT:g} times the fastest, {times:.1f} times as long as "
            f"{fastest.engine}."
        )


def _rules() -> str:
    rows = [[engine, measures, verdict] for engine, (measures, verdict) in RULES.items()]
    return "## What a verdict is\n\n" + table(
        rows, ["engine", "how it measures", "when one is faster or slower"], style="github"
    )
