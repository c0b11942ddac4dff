"""Runs and documents that are good are left alone; odd ones are audited all the same."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.serving.audit import Audited, audit
from harness.serving.audit.corpus import Corpus, printed, same_engine, same_hardware
from harness.serving.compare.alike import compare
from harness.serving.compare.quantity import quantity_of_run
from harness.serving.published.documents import Claim, Configuration
from harness.serving.schema import Metric, OfferedLoad, Parallelism, Scope, ServingRun, Tokens, Totals
from tests.support.audits import CORPUS, of, with_run


def clean_run(load: float, **changes) -> ServingRun:
    rate = 10 * load**0.8
    tpot, ttft, length = 1e3 * load / rate / 1.05, 100.0, 800
    tpot = (load / (rate / length) * 1e3 - ttft) / (length - 1)
    tokens = round(length * 64 * load)
    return ServingRun(
        id=f"run-{load:g}", client="sglang.bench_serving", source="file", mode="online", hardware="H200",
        gpus=8, nodes=1, engine="sglang", version="0.5.7", model="deepseek-ai/DeepSeek-R1",
        workload=OfferedLoad(dataset="random", input_len=3200, output_len=length, concurrency=load,
                          num_prompts=round(64 * load)),
        totals=Totals(duration_s=tokens / rate, completed=round(64 * load), output_tokens=tokens,
                      input_tokens=4 * tokens),
        metrics=(
            Metric(name="throughput", value=rate, unit="tok/s", scope="instance", tokens="output"),
            Metric(name="ttft", value=ttft, unit="ms", scope="request", statistic="mean"),
            Metric(name="tpot", value=tpot, unit="ms", scope="request", statistic="mean"),
            Metric(name="itl", value=tpot, unit="ms", scope="request", statistic="mean"),
        ),
    ).model_copy(update=changes)  # fmt: skip


GOOD = Audited("good", runs=tuple(clean_run(2.0**n) for n in range(8)))


def test_a_clean_sweep_is_silent():
    assert audit(GOOD, CORPUS) == []


def test_a_clean_document_is_silent():
    setup = Configuration(name="good", hardware="H200", gpus=8, nodes=1, engine="sglang", version="0.5.7",
                          image="lmsysorg/sglang:v0.5.7-20260101", mode="online")  # fmt: skip
    best = max(GOOD.runs, key=lambda run: run.metrics[0].value)
    claim = Claim(id="best", quote="the best was 486 output tok/s over 8 GPUs", where="table", kind="derived",
                  metric=Metric(name="throughput", value=float(round(best.metrics[0].value)), unit="tok/s",
                                scope="instance", tokens="output"), hardware="H200", gpus=8, nodes=1,
                  engine="sglang", mode="online", workload=best.workload, refers_to=(best.id,))  # fmt: skip
    good = replace(GOOD, date="2026-02-01", configurations=(setup,), claims=(claim,))
    rows = Corpus({run.id: run for run in GOOD.runs}, {"best": claim})
    assert [(f.rule, f.severity) for f in audit(good, rows)] == [("recomputed", "note")]


SLOW = Metric(name="throughput", value=100.0, unit="tok/s", scope="instance", tokens="output")


@pytest.mark.parametrize("rule, changes", [
    ("throughput_falls", {"metrics": (SLOW,)}),
    ("output_lengths_differ", {"totals": Totals(completed=4096, output_tokens=4096 * 68)}),
    ("unlike_runs", {"mode": "offline"}),
    ("unlike_runs", {"workload": OfferedLoad(output_len=800, concurrency=64, warmup_s=10.0)}),
    ("rate_not_served", {"workload": OfferedLoad(output_len=800, concurrency=64, request_rate=50.0)}),
])  # fmt: skip
def test_one_unlike_run_in_a_clean_sweep_is_found(rule, changes):
    assert of(rule, with_run(GOOD, "run-64", **changes))


def test_repeats_and_other_lengths_are_no_fall_and_no_cold_start():
    slow = (SLOW.model_copy(update={"value": 150.0}),)
    again = clean_run(64.0, id="again", metrics=slow)
    assert not of("throughput_falls", Audited("good", runs=(clean_run(64.0), again)))
    alone = clean_run(1.0, id="alone", metrics=(SLOW,))
    assert of("single_request_differs", Audited("good", runs=(clean_run(1.0), alone)))
    longer = alone.workload.model_copy(update={"input_len": 128000.0})
    other = alone.model_copy(update={"workload": longer})
    assert not of("single_request_differs", Audited("good", runs=(clean_run(1.0), other)))
    machine = alone.model_copy(update={"hardware": "B200"})
    assert not of("single_request_differs", Audited("good", runs=(clean_run(1.0), machine)))


# Whatever a file holds


ODD = st.sampled_from([None, 0, 1, 7, 128, 10**15])
ODD_METRICS = st.lists(
    st.builds(
        Metric,
        name=st.sampled_from(["throughput", "tpot", "itl", "ttft", "tokens", "e2e", "concurrency"]),
        value=st.sampled_from([-1.0, 0.0, 1e-12, 1.0, 46.0, 1e15]),
        unit=st.sampled_from(["tok/s", "ms", "s", "1", "tokens"]),
        scope=st.sampled_from(get_args(Scope)),
        tokens=st.sampled_from(get_args(Tokens)),
        statistic=st.sampled_from(["total", "mean", "median"]),
    ),
    max_size=4,
).map(tuple)
ODD_RUNS = st.builds(
    ServingRun,
    id=st.uuids().map(str),
    client=st.sampled_from(["", "c"]),
    source=st.just("s"),
    mode=st.sampled_from(["online", "offline", "unknown"]),
    gpus=ODD, nodes=ODD, flags=st.sampled_from([(), ("--tp 8",), ("",)]),
    parallelism=st.builds(Parallelism, prefill_gpus=ODD, decode_gpus=ODD),
    workload=st.builds(OfferedLoad, input_len=ODD, output_len=ODD, concurrency=ODD, request_rate=ODD,
                       num_prompts=ODD, warmup_s=ODD),
    totals=st.builds(Totals, duration_s=ODD, completed=ODD, input_tokens=ODD, output_tokens=ODD),
    metrics=ODD_METRICS,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(ODD_RUNS, min_size=1, max_size=4))
def test_odd_runs_are_audited_and_compared(runs):
    assert isinstance(audit(Audited("odd", runs=tuple(runs)), CORPUS), list)
    figures = [quantity_of_run(run, metric) for run in runs for metric in run.metrics[:2]]
    for a, b in itertools.product(figures, figures):
        found = compare(a, b)
        assert found.verdict == "refused" or found.ratio is not None or b.metric.value == 0


# Helpers


def test_how_a_text_prints_a_number():
    assert printed(2656, 2655.89) and printed(66194, 66194.8) and printed(17000, 16964.2)
    assert not printed(2656, 2658) and not printed(46.0, 48.5)


def test_names_of_machines_and_engines():
    assert same_hardware("8x AMD Instinct MI300X", "mi300") and not same_hardware("MI300X", "MI350X")
    assert not same_hardware("H200", "H100") and not same_hardware("", "H200")
    assert (
        same_engine("TensorRT-LLM", "trt-llm")
        and not same_engine("vllm", "sglang")
        and not same_engine("", "vllm")
    )
