"""The simulation of the scheduler."""

from dataclasses import replace

import pytest

from shapes.scheduler import Workload, simulate
from shapes.workloads import documented


def decode_steps(workload: Workload) -> list[list[int]]:
    """The sorted KV lengths of each decode step."""
    return [
        sorted(length + i for length in phase.lengths)
        for phase in simulate(workload)
        if phase.lengths
        for i in range(phase.steps)
    ]


def slowly(workload: Workload) -> list[tuple[list[int], int]]:
    """The same scheduler, simulated step by step and token by token: (KV lengths, prompt tokens)."""
    waiting = list(enumerate(workload.requests()))
    active: list[dict] = []
    steps: list[tuple[list[int], int]] = []
    clock = 0
    while waiting or active:
        while waiting and len(active) < workload.places and waiting[0][0] * workload.arrival_steps <= clock:
            _, (isl, osl) = waiting.pop(0)
            elsewhere = workload.policy == "disaggregated"
            active.append({"isl": isl, "osl": osl, "cached": isl * elsewhere, "out": int(elsewhere)})
            active = [r for r in active if r["out"] < r["osl"]]
        prefilling = [r for r in active if r["cached"] < r["isl"]]
        decoding = [r for r in active if r["cached"] >= r["isl"]]
        if workload.policy == "prefill_first" and prefilling:
            decoding = []
        budget = workload.token_budget - len(decoding) * (workload.policy == "mixed")
        prefilled = 0
        for r in prefilling:
            tokens = min(r["isl"] - r["cached"], budget - prefilled)
            r["cached"] += tokens
            prefilled += tokens
            r["out"] += r["cached"] == r["isl"]
        for r in decoding:
            r["cached"] += 1
            r["out"] += 1
        if active:
            steps.append((sorted(r["cached"] for r in decoding), prefilled))
        active = [r for r in active if r["out"] < r["osl"]]
        clock += 1
    return steps


SMALL = [
    Workload(10, 6, 3, 7), Workload(10, 1, 3, 7), Workload(1, 1, 1, 1),
    Workload(10, 6, 20, 7, token_budget=4, max_running=4), Workload(10, 6, 20, 20, max_running=3),
    Workload(30, 12, 4, 25, range_ratio=0.2, token_budget=50),
    Workload(30, 12, 4, 25, range_ratio=0.01, token_budget=7, seed=5),
    Workload(30, 12, 4, 25, range_ratio=0.3, arrival_steps=2.7), Workload(30, 12, 4, 9, arrival_steps=40),
]  # fmt: skip


@pytest.mark.parametrize("policy", ["prefill_first", "mixed", "disaggregated"])
@pytest.mark.parametrize("workload", SMALL, ids=str)
def test_the_fast_simulation_agrees_with_the_slow_one(workload, policy):
    workload = replace(workload, policy=policy)
    fast = [
        (sorted(length + i for length in phase.lengths), phase.prefill)
        for phase in simulate(workload)
        for i in range(phase.steps)
    ]
    assert fast == slowly(workload)


def test_random_lengths_make_batches_ragged_and_are_drawn_as_sglang_draws_them():
    workload = Workload(3200, 800, 128, 500, range_ratio=0.25)
    requests = workload.requests()
    assert requests == workload.requests() != replace(workload, seed=1).requests()
    assert all(800 <= isl <= 3200 and 200 <= osl <= 800 for isl, osl in requests)
    assert max(lengths[-1] - lengths[0] for lengths in decode_steps(workload)) > 2000


def test_mean_batches_agree_with_the_concurrency_that_dstack_measured():
    """`concurrency` of SGLang on MI300X in dstackai/benchmarks, online_results.csv. The last wave of the 500
    requests is smaller, so the mean is below the limit."""
    measured = {4: 3.9999, 8: 7.9438, 16: 15.7319, 32: 31.3594, 64: 62.6092, 128: 125.0876}
    for concurrency, mean in measured.items():
        steps = decode_steps(documented()[f"serving-3200-800-c{concurrency}"].workload)
        assert sum(map(len, steps)) / len(steps) == pytest.approx(mean, rel=0.01)


def test_the_steady_part_is_always_full():
    moai = documented()["serving-512-512-c10800"].on_rank
    steps = decode_steps(moai)
    assert {len(lengths) for lengths in steps} == {450}
    assert 511 < len(steps) < len(decode_steps(replace(moai, steady=False)))
    # Requests are sent at a rate that spreads them over all stages of their answers.
    assert all(lengths[-1] - lengths[0] > 400 for lengths in steps)


@pytest.mark.parametrize(("field", "value", "line"), [
    ("isl", 0, "isl=0 of a workload must be at least 1"),
    ("policy", "fifo", "unknown policy 'fifo'; policies: prefill_first, mixed, disaggregated"),
    ("range_ratio", 0, "range_ratio=0 must be above 0 and at most 1"),
    ("max_running", 0, "max_running=0 of a workload must be at least 1"),
    ("arrival_steps", -1, "arrival_steps=-1 of a workload must not be negative"),
    ("token_budget", 1, "token_budget=1 must be at least the 2 requests of a step"),
])  # fmt: skip
def test_an_impossible_workload_is_one_clear_line(field, value, line):
    with pytest.raises(ValueError) as error:
        replace(Workload(10, 10, 2, 4, policy="mixed"), **{field: value})
    assert str(error.value) == line


# Prompt chunks


def chunk_steps(workload: Workload) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """(decoding requests, prompt chunks) of each step."""
    return [
        (len(phase.lengths), tuple((new, prefix + i * new) for new, prefix in phase.chunks))
        for phase in simulate(workload)
        for i in range(phase.steps)
    ]


def test_whole_prompts_wait_for_a_step_that_holds_them():
    whole = Workload(10, 2, 5, 5, token_budget=25, whole_prompts=True)
    assert chunk_steps(whole) == [(0, ((10, 0),) * n) for n in (2, 2, 1)] + [(5, ())]
    longer = replace(whole, token_budget=8, num_prompts=1)
    assert chunk_steps(longer) == [(0, ((8, 0),)), (0, ((2, 8),)), (1, ())]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("workload", SMALL, ids=str)
def test_chunks_make_up_each_prompt_from_its_first_token(workload, policy, whole):
    workload = replace(workload, policy=policy, whole_prompts=whole)
    open_prompts: list[int] = []
    done: list[int] = []
    for phase in simulate(workload):
        for i in range(phase.steps):
            assert phase.prefill == sum(new for new, _ in phase.chunks)
            for new, first in phase.chunks:
                prefix = first + i * new
                assert new > 0
                if prefix:
                    open_prompts.remove(prefix)
                open_prompts.append(prefix + new)
                done.append(new)
    assert sorted(open_prompts) == sorted(isl for isl, _ in workload.requests())
    assert sum(done) == sum(open_prompts)
