"""The comparisons of a case judged together, and redone from the record."""

import itertools
import math

import pytest

import kernels
from harness.plan.entry import Entry
from harness.plan.memory import Rotation
from harness.plan.settings import Setting
from harness.results.comparison import compare_samples
from harness.results.schema import Cell
from harness.run.cells import Group, build_records
from harness.statistics.multiple import JointVerdict, joint_verdicts, stopping_reason
from harness.timing.rounds import Rounds, measure
from kernels.platform import Platform
from shapes.case import Case
from tests.support.recorded_verdicts import redo
from tests.support.simulated_machine import OFFSETS, QUIET, Machine, Noise
from tests.support.written_runs import a_run


def session(true: dict[str, float], noise: Noise = QUIET, seed: int = 1, **policy: object) -> Rounds:
    return Machine(true, noise, seed).measured(**policy)


def judged(
    rounds: Rounds, *wanted: str, baseline: str | None = "anchor", rerun: str | None = None
) -> list[JointVerdict]:
    series = {name: rounds.series(name) for name in (*wanted, baseline, rerun) if name}
    return joint_verdicts(series, rounds.blocks, wanted, baseline, rerun=rerun)


def questions(verdicts: list[JointVerdict]) -> list[tuple[str, str, str]]:
    return [(j.a, j.b, j.about) for j in verdicts]


def test_each_against_the_baseline_and_the_winner_against_the_runner_up():
    rounds = session({"anchor": 1.0, "a": 1.5, "b": 0.5, "c": 0.7})
    assert questions(judged(rounds, "anchor", "a", "b", "c")) == [
        ("a", "anchor", "baseline"),
        ("b", "anchor", "baseline"),
        ("c", "anchor", "baseline"),
        ("b", "c", "runner-up"),
    ]
    # A baseline whose output is wrong is not among the names: only the others are ranked.
    assert questions(judged(rounds, "a", "b", "c")) == [("b", "c", "runner-up")]
    assert judged(rounds, "anchor") == []
    assert judged(rounds) == []


def test_answered_questions_leave_their_share_of_the_error_to_the_others():
    """Three entries are far from the baseline. One is not, and the two fastest are alike."""
    true = {"anchor": 1.0, "a": 1.5, "b": 0.5, "c": 0.5001, "d": 1.0001}
    found = judged(session(true, Noise(own=0.05)), *true)
    by_pair = {(j.a, j.b): j for j in found}
    for name in "abc":
        assert by_pair[name, "anchor"].comparison.verdict in ("faster", "slower")
        assert by_pair[name, "anchor"].confidence == pytest.approx(1 - 0.05 / 5)
    assert by_pair["d", "anchor"].comparison.verdict == "unclear"
    assert by_pair["d", "anchor"].confidence == pytest.approx(1 - 0.05 / 2)


def test_a_rerun_gives_the_noise():
    rounds = session({"anchor": 1.0, "again": 1.1, "a": 1.05}, Noise(own=0.001))
    (found, _) = judged(rounds, "anchor", "a", rerun="again")
    assert found.noise == pytest.approx(0.09, abs=0.005)
    assert found.comparison.verdict == "same", "they differ by less than the A/A pair"
    for true, expected in ((1.8, "unclear"), (3.0, "slower")):
        (found, _) = judged(session({"anchor": 1.0, "again": 2.0, "a": true}), "anchor", "a", rerun="again")
        assert found.comparison.verdict == expected


@pytest.mark.parametrize(
    ("apart", "half_width", "reason"), [(0.01, 0.005, "clear"), (0.02, 0.005, ""), (0.02, 0.05, "tight")]
)
def test_a_look_before_the_end_wants_more_confidence_than_the_end(apart, half_width, reason):
    """Six blocks lie 4 % from 1, and `apart` to either side of that. Student's t is 2.57 at 95 % and 4.77 at
    99.5 %, and 1.2 times that for the looks."""
    blocks = [block for block in range(6) for _ in range(5)]
    series = {"anchor": [1.0] * 30, "a": [math.exp(0.04 + (-apart if b % 2 else apart)) for b in blocks]}
    series["same"] = [math.exp(-0.003 if b % 2 else 0.003) for b in blocks]  # tight, so it may be unclear
    given = {"rerun": None, "confidence": 0.95, "half_width": half_width}
    assert stopping_reason(series, blocks, ["anchor", "a", "same"], "anchor", **given) == reason
    assert stopping_reason(series, blocks, ["anchor"], "anchor", **given) == "clear", "there is no pair"
    (found, _) = joint_verdicts(series, blocks, ["anchor", "a"], "anchor")
    assert found.comparison.verdict == "slower"


def test_five_equal_entries_are_seldom_told_apart():
    """In 5 % of cases a verdict may be wrong, although the winner is chosen after looking at the times."""
    names = ("anchor", "a", "b", "c", "d")
    wrong = 0
    for seed in range(60):
        rounds = session(dict.fromkeys(names, 1.0), OFFSETS, seed, budget_s=40)
        wrong += any(j.comparison.verdict in ("faster", "slower") for j in judged(rounds, *names))
    assert wrong <= 6


def test_verdicts_of_groups_are_redone_from_the_record():
    """The baseline and its rerun are in each group, with other rounds: in the last group all times are twice
    as long, and the rerun fails. The group between has no times. `mortal` fails in its 17th sample."""
    impls = kernels.implementations("mla_decode")[:5]
    baseline, one, two, broken, mortal = (Entry(i.name, i, Setting(), "eager") for i in impls)
    rerun = Entry(f"{baseline.name} (again)", baseline.impl, Setting(), "eager")
    case = Case("mla_decode", {"batch": 1, "ctx": "64"})
    lives = itertools.count()

    def group(slower: float, rounds: int, *others: Entry) -> Group:
        true = {baseline.name: slower, rerun.name: slower**2} | {other.name: 1.1 * slower for other in others}
        machine = Machine(true, OFFSETS, seed=int(slower))
        samples = machine.entries
        if mortal in others:
            sample = samples[mortal.name]
            samples[mortal.name] = lambda: sample() if next(lives) < 17 else math.nan
        found = measure(
            samples, machine.policy(baseline=baseline.name, rerun=rerun.name, first_rounds=rounds)
        )
        return Group(case, [baseline, *others], Rotation("warm", 1, 0, 0, False), found, baseline, rerun)

    broken.fail("error", "it broke")
    nothing = Group(case, [broken], Rotation("warm", 1, 0, 0, False))
    parts = [group(1.0, 5, one, mortal), nothing, group(2.0, 4, two)]
    mortal.fail("error", parts[0].rounds.dropped[mortal.name])
    parts[2].rounds.dropped[rerun.name] = "so that there is no noise"
    records, _ = build_records(case, parts, Platform("cpu", "x86"), a_run())
    redone = redo([type(r).model_validate_json(r.model_dump_json()) for r in records])
    assert [v.about for v, _ in redone].count("A/A") == 2
    assert [(v.a, v.about) for v, _ in redone if mortal.name in (v.a, v.b)] == []
    assert {v.noise for v, _ in redone if two.name in (v.a, v.b)} == {0.0}
    for stated, found in redone:
        assert stated.verdict == found.verdict
        assert (stated.ratio, stated.low, stated.high) == pytest.approx((found.ratio, found.low, found.high))
    cells = {r.impl: r for r in records if isinstance(r, Cell)}
    assert math.isnan(compare_samples(cells[one.name].samples, cells[two.name].samples).ratio)
