"""Model sizes, lengths, cases, the scheduler simulation, and the suites made of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kernels import OPS
from shapes.attention import Parallel, mla_decode_sizes
from shapes.bins import MOST, decode_bins, reduce_phases, span_of
from shapes.case import Case, merge, parse
from shapes.lengths import parse_span, span_text, spread
from shapes.models import model, models
from shapes.serving import Phase, Workload, simulate
from shapes.suites import suite, suites
from shapes.workloads import documented

ROOT = Path(__file__).parent.parent


# Models and attention


def test_r1_has_the_published_sizes():
    r1 = model("deepseek-r1")
    assert (r1.hidden_size, r1.num_hidden_layers, r1.num_attention_heads) == (7168, 61, 128)
    assert (r1.n_routed_experts, r1.num_experts_per_tok, r1.n_group, r1.topk_group) == (256, 8, 8, 4)
    assert r1.kv_lora_rank + r1.qk_rope_head_dim == 576
    assert (r1.rope_scaling.factor, r1.rope_scaling.original_max_position_embeddings) == (40, 4096)
    assert r1.weight_block_size == (128, 128)
    assert r1.source.startswith("https://")


def test_v3_is_r1_by_another_name():
    v3, r1 = model("deepseek-v3"), model("deepseek-r1")
    assert v3.name == "deepseek-v3"
    assert replace(v3, name=r1.name, source=r1.source) == r1


def test_models_can_be_hashed_and_are_listed():
    assert models() == ["deepseek-r1", "deepseek-v3"]
    assert len({model(name) for name in models()}) == 2


def test_an_unknown_model_is_one_line_that_names_the_models():
    with pytest.raises(ValueError, match=r"^unknown model 'r1'; models: deepseek-r1, deepseek-v3$"):
        model("r1")


@pytest.mark.parametrize(
    ("parallel", "heads"),
    [(Parallel(), 128), (Parallel(tp=8), 16), (Parallel(tp=4), 32), (Parallel(dp=8, ep=8), 128)],
)
def test_heads_of_a_rank(parallel, heads):
    assert parallel.heads(model("deepseek-r1")) == heads


@pytest.mark.parametrize(
    ("parallel", "requests", "batch"),
    [
        (Parallel(tp=8), 128, 128),
        (Parallel(dp=8), 128, 16),
        (Parallel(dp=8), 1, 1),
        (Parallel(dp=8), 9, 2),
        (Parallel(dp=24), 10_800, 450),
    ],
)
def test_requests_of_a_rank(parallel, requests, batch):
    assert parallel.share(requests) == batch


def test_parallel_text():
    assert [Parallel().text, Parallel(tp=8).text, Parallel(dp=8, ep=8).text] == ["tp1", "tp8", "dp8 ep8"]


def test_parallel_that_does_not_fit_is_one_clear_line():
    with pytest.raises(ValueError, match=r"^tp=3 must divide the 128 heads of deepseek-r1$"):
        Parallel(tp=3).heads(model("deepseek-r1"))
    with pytest.raises(ValueError, match=r"^dp=0 must be at least 1$"):
        Parallel(dp=0)


# Lengths and cases


@pytest.mark.parametrize("span", [(1, 1), (1, 2), (3201, 3999), (17, 65)])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 128])
def test_spread_has_the_same_sum_for_every_seed_and_hits_both_ends(span, count):
    lengths = [spread(span, count, seed) for seed in range(5)]
    assert len({sum(values) for values in lengths}) == 1
    assert all(sorted(values) == sorted(lengths[0]) and len(values) == count for values in lengths)
    assert all(span[0] <= value <= span[1] for value in lengths[0])
    if count > 1:
        assert (min(lengths[0]), max(lengths[0])) == span
    assert abs(sum(lengths[0]) / count - sum(span) / 2) <= 0.5


def test_spread_is_shuffled_by_its_seed_alone():
    assert spread((1, 1000), 50, 3) == spread((1, 1000), 50, 3) != spread((1, 1000), 50, 4)


def test_spans_read_as_they_are_written():
    assert parse_span("4096") == parse_span(4096) == (4096, 4096)
    assert parse_span(span_text(3201, 3999)) == (3201, 3999)
    assert span_text(7, 7) == "7"


@pytest.mark.parametrize("text", ["", "a", "1..", "..5", "9..3", "0", "-4", "1..2..3", "3.5"])
def test_a_bad_span_is_one_clear_line(text):
    with pytest.raises(ValueError, match="length") as error:
        parse_span(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_case_text_gives_every_combination():
    assert parse("batch=1,16 ctx=4096") == [
        {"batch": "1", "ctx": "4096"},
        {"batch": "16", "ctx": "4096"},
    ]


@pytest.mark.parametrize("text", ["", "batch", "batch=", "=4", "batch=1,,2", "batch=1 batch=2"])
def test_a_bad_case_text_is_one_clear_line(text):
    with pytest.raises(ValueError, match="case") as error:
        parse(text)
    assert "\n" not in str(error.value)


def test_cases_of_equal_key_merge_their_weights():
    a, b = Case("op", {"n": 1}, weight=0.25), Case("op", {"n": 2}, weight=0.5)
    assert [(case.text, case.weight) for case in merge([a, b, a])] == [("n=1", 0.5), ("n=2", 0.5)]


# The simulation


def decode_steps(workload: Workload) -> list[list[int]]:
    """The sorted KV lengths of each decode step."""
    return [
        sorted(length + i for length in phase.lengths)
        for phase in simulate(workload)
        if phase.lengths
        for i in range(phase.steps)
    ]


def slowly(workload: Workload) -> list[tuple[list[int], int]]:
    """The same scheduler one step and one token of bookkeeping at a time: (KV lengths, prompt tokens)."""
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
    Workload(10, 6, 3, 7),
    Workload(10, 1, 3, 7),
    Workload(1, 1, 1, 1),
    Workload(10, 6, 20, 7, token_budget=4, max_running=4),
    Workload(10, 6, 20, 20, max_running=3),
    Workload(30, 12, 4, 25, range_ratio=0.2, token_budget=50),
    Workload(30, 12, 4, 25, range_ratio=0.01, token_budget=7, seed=5),
    Workload(30, 12, 4, 25, range_ratio=0.3, arrival_steps=2.7),
    Workload(30, 12, 4, 9, arrival_steps=40),
]


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


@pytest.mark.parametrize("policy", ["prefill_first", "mixed", "disaggregated"])
def test_every_request_decodes_all_but_its_first_token(policy):
    workload = Workload(300, 100, 16, 60, policy=policy, token_budget=512, range_ratio=0.3)
    steps = decode_steps(workload)
    seen = Counter(length for lengths in steps for length in lengths)
    wanted = Counter(isl + j for isl, osl in workload.requests() for j in range(1, osl))
    assert seen == wanted
    assert max(map(len, steps)) <= workload.concurrency


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_prompts_are_prefilled_once_within_the_budget(policy):
    workload = Workload(3200, 100, 16, 40, policy=policy, token_budget=2048, range_ratio=0.5)
    phases = list(simulate(workload))
    assert sum(phase.steps * phase.prefill for phase in phases) == sum(isl for isl, _ in workload.requests())
    for phase in phases:
        if policy == "mixed":
            assert phase.prefill + len(phase.lengths) <= workload.token_budget
        else:
            assert phase.prefill <= workload.token_budget
            assert not (phase.prefill and phase.lengths)


@pytest.mark.parametrize("concurrency", [1, 8, 128])
def test_requests_of_equal_length_run_in_lockstep_under_prefill_first(concurrency):
    steps = decode_steps(Workload(3200, 800, concurrency, 500, token_budget=131_072))
    assert all(lengths[0] == lengths[-1] for lengths in steps)
    assert {lengths[0] for lengths in steps} == set(range(3201, 4000))
    waves = -(-500 // concurrency)
    assert len(steps) == waves * 799
    assert Counter(map(len, steps))[concurrency] == 500 // concurrency * 799


def test_mixed_chunked_prefill_makes_batches_ragged():
    steps = decode_steps(Workload(3200, 800, 128, 500, policy="mixed", token_budget=8192))
    ragged = [lengths for lengths in steps if lengths[-1] - lengths[0] > 50]
    assert len(ragged) > 0.5 * len(steps)
    assert len({len(lengths) for lengths in steps}) > 10


def test_random_lengths_make_batches_ragged_and_are_drawn_as_sglang_draws_them():
    workload = Workload(3200, 800, 128, 500, range_ratio=0.25)
    requests = workload.requests()
    assert requests == workload.requests() != replace(workload, seed=1).requests()
    assert all(800 <= isl <= 3200 and 200 <= osl <= 800 for isl, osl in requests)
    assert max(lengths[-1] - lengths[0] for lengths in decode_steps(workload)) > 2000


def test_an_offline_batch_runs_no_more_than_the_engine_lets_in():
    steps = decode_steps(Workload(3200, 800, 1024, 1024, max_running=256))
    assert {len(lengths) for lengths in steps} == {256}
    assert len(steps) == 4 * 799


def test_the_steady_part_is_always_full():
    moai = documented()["serving-512-512-c10800"].on_rank
    steps = decode_steps(moai)
    assert {len(lengths) for lengths in steps} == {450}
    assert 511 < len(steps) < len(decode_steps(replace(moai, steady=False)))
    # Requests are sent at a rate that spreads them over all stages of their answers.
    assert all(lengths[-1] - lengths[0] > 400 for lengths in steps)


def test_mean_batches_agree_with_the_concurrency_that_dstack_measured():
    """`concurrency` of SGLang on MI300X in dstackai/benchmarks, online_results.csv: 500 requests end in a
    last, smaller wave, which pulls the mean below the limit."""
    measured = {4: 3.9999, 8: 7.9438, 16: 15.7319, 32: 31.3594, 64: 62.6092, 128: 125.0876}
    for concurrency, mean in measured.items():
        steps = decode_steps(documented()[f"serving-3200-800-c{concurrency}"].workload)
        assert sum(map(len, steps)) / len(steps) == pytest.approx(mean, rel=0.01)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("isl", 0, "isl=0 of a workload must be at least 1"),
        ("policy", "fifo", "unknown policy 'fifo'; policies: prefill_first, mixed, disaggregated"),
        ("range_ratio", 0, "range_ratio=0 must be above 0 and at most 1"),
        ("max_running", 0, "max_running=0 of a workload must be at least 1"),
        ("arrival_steps", -1, "arrival_steps=-1 of a workload must not be negative"),
    ],
)
def test_an_impossible_workload_is_one_clear_line(field, value, line):
    with pytest.raises(ValueError) as error:
        replace(Workload(10, 10, 2, 4), **{field: value})
    assert str(error.value) == line


def test_a_mixed_budget_must_hold_a_token_of_each_request():
    with pytest.raises(ValueError, match=r"^token_budget=64 must be at least the 128 requests of a step$"):
        Workload(3200, 800, 128, 500, policy="mixed", token_budget=64)


@pytest.mark.parametrize("policy", ["prefill_first", "mixed", "disaggregated"])
@pytest.mark.parametrize("range_ratio", [1.0, 0.1])
def test_simulating_500_prompts_takes_less_than_a_second(policy, range_ratio):
    start = time.perf_counter()
    reduce_phases(simulate(Workload(3200, 800, 128, 500, policy=policy, range_ratio=range_ratio)))
    assert time.perf_counter() - start < 1


# Bins


WORKLOADS = {name: run.on_rank for name, run in documented().items()} | {
    "ragged": Workload(3200, 800, 128, 500, range_ratio=0.1),
    "ragged mixed": Workload(3200, 800, 64, 500, policy="mixed", token_budget=8192, range_ratio=0.3),
    "short": Workload(100, 40, 16, 100, policy="mixed", token_budget=64),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_bins_keep_the_kv_tokens_of_the_simulation(name):
    phases = [phase for phase in simulate(WORKLOADS[name]) if phase.lengths]
    count = sum(phase.steps for phase in phases)
    requests = sum(phase.steps * len(phase.lengths) for phase in phases)
    tokens = sum(
        phase.steps * sum(phase.lengths) + len(phase.lengths) * phase.steps * (phase.steps - 1) // 2
        for phase in phases
    )
    bins = decode_bins(WORKLOADS[name])
    assert 1 <= len(bins) <= MOST
    assert sum(b.weight for b in bins) == pytest.approx(1)
    binned = sum(b.weight * sum(spread(parse_span(b.ctx), b.batch, 0)) for b in bins)
    assert binned == pytest.approx(tokens / count, rel=0.01)
    assert sum(b.weight * b.batch for b in bins) == pytest.approx(requests / count, rel=0.02)


def test_bins_are_made_once_and_ordered_by_weight():
    workload = documented()["serving-3200-800-c128-mixed"].on_rank
    bins = decode_bins(workload)
    assert decode_bins(replace(workload)) is bins
    assert [b.weight for b in bins] == sorted((b.weight for b in bins), reverse=True)


def test_a_wave_of_its_own_size_is_a_bin_of_its_own():
    bins = decode_bins(documented()["serving-3200-800-c128"].on_rank)
    assert {b.batch for b in bins} == {128, 116}
    assert sum(b.weight for b in bins if b.batch == 116) == pytest.approx(0.25)
    assert not any(".." in b.ctx for b in bins), "requests in lockstep have one length"


def test_a_bin_never_exceeds_the_lengths_of_its_steps():
    for name in ("serving-2000-2000-c10800", "serving-3200-800-c128-mixed"):
        workload = documented()[name].on_rank
        for b in decode_bins(workload):
            low, high = parse_span(b.ctx)
            assert workload.isl < low <= high < workload.isl + workload.osl


@pytest.mark.parametrize("span", [(100, 100), (3201, 3999), (10, 400)])
@pytest.mark.parametrize("count", [2, 9, 450])
def test_span_of_gives_back_the_span_that_was_spread(span, count):
    lengths = spread(span, count, 0)
    mean = sum(lengths) / count
    variance = sum((length - mean) ** 2 for length in lengths) / count
    found = parse_span(span_of(mean, variance, count, seen=(1, 10_000)))
    assert abs(found[0] - span[0]) <= 1
    assert abs(found[1] - span[1]) <= 1


def test_no_decode_step_makes_no_bin():
    assert reduce_phases(simulate(Workload(10, 1, 2, 4))) == []


def test_few_bins_still_keep_the_tokens():
    phases = [Phase(10, (100, 300), 0), Phase(30, (1000, 1000), 0)]
    (only,) = reduce_phases(phases, most=1)
    assert (only.weight, only.batch) == (1.0, 2)
    tokens = (10 * (400 + 9) + 30 * (2000 + 29)) / 40
    assert sum(spread(parse_span(only.ctx), 2, 0)) == pytest.approx(tokens, abs=1)


# Suites


def test_the_suites_by_name():
    served = [f"serving-3200-800-c{c}" for c in (1, 2, 4, 8, 16, 32, 64, 128)]
    served += [f"serving-3200-{osl}-c128" for osl in (1600, 3200, 6400)]
    served += [f"serving-3200-800-c{c}-mixed" for c in (4, 8, 16, 32, 64, 128)]
    served += [f"offline-3200-800-b{b}" for b in (32, 64, 128, 256, 512, 1024)]
    served += [f"offline-3200-{osl}-b{b}" for osl in (1600, 3200) for b in (256, 512, 1024)]
    served += [f"serving-{load}-c10800" for load in ("512-512", "1000-1000", "2000-2000", "2000-100")]
    assert list(suites()) == ["smoke", "r1-tp8", "r1-tp4", "r1-dp-ep8", *served]


@pytest.mark.parametrize("name", suites())
def test_a_suite_has_weighted_cases_that_the_op_reads_unchanged(name):
    chosen = suite(name)
    assert chosen.name == name
    assert "\n" not in chosen.description
    cases = chosen.cases("mla_decode")
    assert 1 <= len(cases) <= 8
    assert sum(case.weight for case in cases) == pytest.approx(1)
    assert len({case.key for case in cases}) == len(cases)
    for case in cases:
        assert OPS["mla_decode"].case(case.sizes).key == case.key


def test_an_op_without_cases_has_none():
    assert suite("r1-tp8").cases("block_scale_gemm") == []


def test_smoke_is_small():
    for case in suite("smoke").cases("mla_decode"):
        lengths = spread(parse_span(case.sizes["ctx"]), case.sizes["batch"], 0)
        assert sum(lengths) * 576 < 200_000
    assert {case.sizes["page"] for case in suite("smoke").cases("mla_decode")} == {1, 16, 64}


@pytest.mark.parametrize(("name", "heads"), [("r1-tp8", 16), ("r1-tp4", 32)])
def test_the_sweep_has_each_concurrency_once_the_most_served_first(name, heads):
    cases = suite(name).cases("mla_decode")
    assert [case.sizes["batch"] for case in cases] == [64, 128, 32, 16, 8, 4, 2, 1]
    assert {case.weight for case in cases} == {1 / 8}
    assert {case.place for case in cases} == {f"deepseek-r1 {name[3:]} decode"}
    r1 = model("deepseek-r1")
    for case in cases:
        parallel = Parallel(tp=int(name[-1]))
        assert case.sizes == mla_decode_sizes(r1, parallel, case.sizes["batch"], "3201..3999")
        assert case.sizes["heads"] == heads


def test_dp_attention_has_all_heads_and_a_share_of_the_requests():
    cases = suite("r1-dp-ep8").cases("mla_decode")
    assert {case.sizes["heads"] for case in cases} == {128}
    assert {case.sizes["batch"] for case in cases} == {128, 64, 32, 16}


def test_pages_and_cache_formats():
    for name, chosen in suites().items():
        if name != "smoke":
            formats = {(case.sizes["page"], case.sizes["kv"]) for case in chosen.cases("mla_decode")}
            assert formats == {(64, "fp8" if name.endswith("c10800") else "bf16")}


def test_an_unknown_suite_is_one_line_that_names_the_suites():
    with pytest.raises(ValueError, match=r"^unknown suite 'r1'; suites: smoke, r1-tp8, ") as error:
        suite("r1")
    assert "\n" not in str(error.value)


def test_listing_suites_imports_no_library_and_simulates_nothing():
    code = (
        "import sys; from shapes.suites import suites;"
        "[(s.name, s.description) for s in suites().values()];"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'pandas', 'numpy', 'scipy', 'triton', 'pydantic', 'kernels', 'harness'}),"
        "'shapes.bins' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[] False"
