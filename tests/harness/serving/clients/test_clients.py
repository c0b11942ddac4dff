"""SGLang's and vLLM's own clients: a file's numbers land under their name, unit, scope and kind of tokens."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.serving import load
from harness.serving.clients import FORMATS
from harness.serving.clients.files import UnreadableError, read
from tests.support.paths import SERVING_DATA

DATA = SERVING_DATA
CLIENTS = {
    "sglang_bench_serving": "sglang.bench_serving",
    "sglang_bench_one_batch_server": "sglang.bench_one_batch_server",
    "sglang_bench_one_batch": "sglang.bench_one_batch",
    "sglang_bench_offline_throughput": "sglang.bench_offline_throughput",
    "vllm_serve": "vllm.serve",
    "vllm_throughput": "vllm.throughput",
    "vllm_latency": "vllm.latency",
}
FILES = {
    path: next(client for stem, client in CLIENTS.items() if path.name.startswith(stem))
    for path in sorted(DATA.iterdir())
    if path.name.startswith(tuple(CLIENTS))
}
SERVING = [p for p, client in FILES.items() if client in ("sglang.bench_serving", "vllm.serve")]
LATENCIES = {"e2e_latency": "e2e", "e2el": "e2e", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}


def rows(path):
    content = read(path).content
    return [row for _, row in content] if read(path).kind == "jsonl" else [content]


def written(tmp_path, row, name="run.json"):
    path = tmp_path / name
    path.write_text(json.dumps(row))
    return path


def only(path):
    (run,) = load(path)
    return run


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_file_is_its_clients_and_no_others(path):
    assert {run.client for run in load(path)} == {FILES[path]}
    assert [one.NAME for one in FORMATS if one.recognises(read(path))] == [FILES[path]]
    assert all(run.gpus is None or "server_info" in run.extra for run in load(path))
    assert not [f for run in load(path) for f in run.findings if f.rule == "unreadable"]


@pytest.mark.parametrize("path", SERVING, ids=lambda p: p.name)
def test_every_latency_and_throughput_is_there_as_it_was_written(path):
    for run, row in zip(load(path), rows(path), strict=True):
        seen = 0
        for key, value in row.items():
            statistic, _, rest = key.partition("_")
            name = LATENCIES.get(rest.removesuffix("_ms"))
            if name and key.endswith("_ms"):
                metric = run.metric(name, statistic)
                assert (metric.value, metric.unit, metric.scope, metric.tokens) == (
                    value,
                    "ms",
                    "request",
                    "none",
                )
                seen += 1
        assert seen >= 12
        kinds = {"input_throughput": "input", "output_throughput": "output"}
        kinds |= {"total_throughput": "total", "total_token_throughput": "total"}
        for key in kinds.keys() & row.keys():
            metric = run.metric("throughput", tokens=kinds[key])
            assert (metric.value, metric.unit, metric.scope) == (row[key], "tok/s", "instance")
        assert run.value("request_throughput") == row["request_throughput"]
        assert run.totals.duration_s == row["duration"]
        assert run.totals.completed == row["completed"]
        assert run.totals.input_tokens == row["total_input_tokens"]
        assert run.totals.output_tokens == row["total_output_tokens"]
        assert run.workload.concurrency == row["max_concurrency"]
        assert run.mode == "online"


@pytest.mark.parametrize("path", SERVING, ids=lambda p: p.name)
def test_the_units_hold_against_one_another(path):
    for run in load(path):
        total, took = run.totals, run.totals.duration_s
        assert run.value("throughput", tokens="output") == pytest.approx(total.output_tokens / took)
        assert run.value("request_throughput") == pytest.approx(total.completed / took)
        in_and_out = run.value("throughput", tokens="total")
        if in_and_out:
            assert in_and_out == pytest.approx((total.input_tokens + total.output_tokens) / took)
        length = total.output_tokens / total.completed
        e2e = run.value("e2e", "mean")
        if e2e:
            steps = (length - 1) * run.value("tpot", "mean")
            assert e2e == pytest.approx(run.value("ttft", "mean") + steps, rel=1e-9)
        if run.value("concurrency"):
            assert run.value("concurrency") == pytest.approx(
                e2e / 1e3 * run.value("request_throughput"), rel=1e-9
            )


def test_what_sglang_keeps_of_each_request():
    path = DATA / "sglang_bench_serving_0.5.9_details.jsonl"
    run, (row,) = only(path), rows(path)
    assert (run.totals.completed, run.totals.failed) == (7, 1)
    assert run.samples.input_lens == (32,) * 7
    assert run.samples.output_lens == (12,) * 7
    assert math.fsum(run.samples.ttfts_ms) / 7 == pytest.approx(run.value("ttft", "mean"))
    gaps = [gap for one in run.samples.itls_ms for gap in one]
    assert len(gaps) == 7 * 11
    assert math.fsum(gaps) / len(gaps) == pytest.approx(run.value("itl", "mean"))
    assert run.samples.e2es_ms == ()
    assert run.label == row["tag"] == "c4"
    assert run.workload.request_rate == 50
    assert "generated_texts" not in run.extra
    assert any("generated_texts (8 entries)" in note for note in run.notes)


def test_what_the_server_says_of_itself():
    run = only(DATA / "sglang_bench_serving_0.5.9.jsonl")
    assert (run.engine, run.version, run.model) == ("sglang", "0.5.9", "deepseek-ai/DeepSeek-R1")
    assert (run.precision, run.nodes, run.gpus) == ("fp8", 1, 8)
    degrees = run.parallelism
    assert (degrees.tp, degrees.pp, degrees.dp, degrees.ep, degrees.dp_attention) == (8, 1, 8, 8, True)
    assert "--attention-backend=flashmla" in run.flags
    assert "--disable-radix-cache" in run.flags
    assert not any(flag.startswith("--speculative") for flag in run.flags)
    assert run.extra["server_info"]["internal_states"][0]["memory_usage"]["token_capacity"] == 511232
    assert "not-a-real-key" not in run.model_dump_json()


@pytest.mark.parametrize(
    ("degrees", "gpus"),
    [
        ({"tp_size": 8, "pp_size": 2, "dp_size": 1}, 16),
        ({"tp_size": 2, "pp_size": 1, "dp_size": 4, "enable_dp_attention": False}, 8),
        ({"tp_size": 8, "pp_size": 1, "dp_size": 8, "enable_dp_attention": True}, 8),
        ({"tp_size": 8, "pp_size": 1, "dp_size": 8}, None),
        ({"tp_size": 8, "dp_size": 1}, None),
        ({"tp_size": "8", "pp_size": 1, "dp_size": 1}, None),
    ],
)
def test_gpus_are_counted_only_where_the_server_says_all_degrees(tmp_path, degrees, gpus):
    (row,) = rows(DATA / "sglang_bench_serving_0.5.9.jsonl")
    assert only(written(tmp_path, row | {"server_info": degrees})).gpus == gpus


def test_disaggregated_servers_are_counted_side_by_side(tmp_path):
    (row,) = rows(DATA / "sglang_bench_serving_0.5.9.jsonl")
    one = {"tp_size": 8, "pp_size": 1, "dp_size": 1, "nnodes": 1, "version": "0.5.9"}
    info = {"prefill": [one, one], "decode": [one | {"tp_size": 16, "nnodes": 2}]}
    run = only(written(tmp_path, row | {"server_info": info}))
    assert (run.parallelism.prefill_gpus, run.parallelism.decode_gpus, run.gpus, run.nodes) == (16, 16, 32, 4)
    assert run.parallelism.tp == 16
    assert run.parallelism.disaggregated


@pytest.mark.parametrize(
    ("changed", "lengths"),
    [
        ({}, (64, 16)),
        ({"random_range_ratio": 0.0}, (32.5, 8.5)),
        ({"random_range_ratio": 0.5}, (48, 12)),
        ({"dataset_name": "sharegpt"}, (None, None)),
        ({"dataset_name": "sharegpt", "sharegpt_output_len": 99}, (None, 99)),
        ({"dataset_name": "generated-shared-prefix"}, (None, None)),
    ],
)
def test_random_lengths_hold_for_random_data_only(tmp_path, changed, lengths):
    (row,) = rows(DATA / "sglang_bench_serving_0.5.23.jsonl") or ()
    workload = only(written(tmp_path, row | changed)).workload
    assert (workload.input_len, workload.output_len) == lengths


@pytest.mark.parametrize(
    ("rate", "read_as", "findings"),
    [("inf", 0.0, 0), (math.inf, 0.0, 0), (4, 4.0, 0), (None, None, 0), ("trace", None, 0), ("4", None, 1)],
)
def test_request_rates(tmp_path, rate, read_as, findings):
    for name in ("sglang_bench_serving_0.4.3.jsonl", "vllm_serve_0.32.json"):
        (row,) = rows(DATA / name)
        run = only(written(tmp_path, row | {"request_rate": rate}))
        assert run.workload.request_rate == read_as
        assert len([f for f in run.findings if f.rule == "unreadable"]) == findings


def test_peaks_of_one_second_are_no_concurrency():
    run = only(DATA / "sglang_bench_serving_0.5.23.jsonl")
    assert run.value("max_concurrent_requests") == 16 > run.workload.concurrency
    assert run.value("concurrency", "max") is None
    assert run.value("max_output_tokens_per_s") == 144
    assert run.metric("throughput", "max") is None


def test_goodput_of_sglang(tmp_path):
    (row,) = rows(DATA / "sglang_bench_serving_0.5.23.jsonl")
    good = {"goodput_slos_ms": {"ttft": 60.0}, "request_goodput": 20.5, "slo_attainment": 0.75}
    run = only(written(tmp_path, row | good))
    assert (run.value("goodput"), run.metric("goodput").unit) == (20.5, "req/s")
    assert run.value("slo_attainment") == 0.75
    assert run.extra["goodput_slos_ms"] == {"ttft": 60.0}


def test_vllm_in_detail():
    path = DATA / "vllm_serve_0.32_detailed.json"
    run, (row,) = only(path), rows(path)
    assert (run.model, run.engine, run.date) == ("tiny", "", "20261122-052138")
    assert run.extra["gpu"] == "H200"
    assert run.extra["backend"] == "openai"
    assert (run.parallelism.tp, run.gpus) == (8, None)
    assert (run.totals.completed, run.totals.failed, run.workload.num_prompts) == (7, 1, 8)
    assert run.value("goodput") == row["request_goodput"]
    assert run.value("ttft", "p99.9") == row["p99.9_ttft_ms"]
    assert run.value("client_queue_time", "mean") == row["mean_client_queue_time_ms"]
    assert len(run.samples.ttfts_ms) == len(run.samples.itls_ms) == 7
    assert math.fsum(run.samples.e2es_ms) / 7 == pytest.approx(run.value("e2e", "mean"))
    for e2e, ttft in zip(run.samples.e2es_ms, run.samples.ttfts_ms, strict=True):
        assert e2e > ttft
    assert not {"generated_texts", "start_times", "errors", "itls"} & run.extra.keys()
    assert any("generated_texts (8 entries), start_times" in n or "start_times" in n for n in run.notes)


def test_vllms_old_script_with_its_colon():
    old, new = only(DATA / "vllm_serve_0.8.json"), only(DATA / "vllm_serve_0.32_detailed.json")
    assert old.value("goodput") == new.value("goodput") > 0
    assert old.totals == new.totals  # failed: counted from the errors
    assert old.samples.ttfts_ms == new.samples.ttfts_ms
    assert old.samples.e2es_ms == ()
    assert old.engine == "vllm"


def test_appended_runs_are_rows_and_chunks_show_in_itl():
    chunks, single = load(DATA / "vllm_serve_0.32_appended.jsonl")
    assert (chunks.label, single.label) == ("chunks-of-4", "one-by-one")
    assert chunks.source.endswith(":1")
    assert single.source.endswith(":2")
    assert chunks.value("itl", "mean") > 2.5 * chunks.value("tpot", "mean")
    assert single.value("itl", "mean") == pytest.approx(single.value("tpot", "mean"), rel=0.15)
    assert (chunks.workload.request_rate, single.workload.request_rate) == (0.0, 20.0)


def test_vllm_lists_stand_in_for_means_that_were_not_asked_for(tmp_path):
    (row,) = rows(DATA / "vllm_serve_0.32.json")
    short = {k: v for k, v in row.items() if "e2el" not in k}
    run = only(written(tmp_path, short))
    assert run.value("e2e", "mean") == pytest.approx(row["mean_e2el_ms"])
    assert run.metric("e2e").derived == "mean of latencies"
    queued = sum(row["queue_times"]) / 32 * 1e3
    assert run.value("client_queue_time", "mean") == pytest.approx(queued)
    lost = short | {"latencies": [0.0, *row["latencies"][1:]], "completed": 31, "failed": 1}
    run = only(written(tmp_path, lost))
    assert len(run.samples.e2es_ms) == 31
    assert run.value("client_queue_time") is None


def test_one_batch():
    first, _ = load(DATA / "sglang_bench_one_batch_0.5.9.jsonl")
    prefill, step = first.metric("prefill"), first.metric("decode_step")
    assert (prefill.value, prefill.unit, prefill.scope) == (pytest.approx(95.13), "ms", "instance")
    assert (step.value, step.statistic) == (pytest.approx(10.42), "median")
    asked = first.workload
    assert (asked.input_len, asked.output_len, asked.num_prompts, asked.concurrency) == (1024, 64, 1, 1)
    tokens = 1024 + 64
    assert first.value("throughput", tokens="total") == pytest.approx(tokens / first.totals.duration_s)
    assert first.value("throughput", tokens="output") is None
    assert first.value("decode_throughput") == pytest.approx(1e3 / step.value)
    assert first.value("prefill_throughput") == pytest.approx(1024 / prefill.value * 1e3)
    assert (first.mode, first.value("ttft")) == ("offline", None)


@pytest.mark.parametrize("version", ["0.4.3", "0.5.3", "0.5.9", "0.5.23"])
def test_output_throughput_of_one_batch_server_is_over_the_whole_time_in_every_version(version):
    run = load(DATA / f"sglang_bench_one_batch_server_{version}.jsonl")[0]
    found = run.metric("throughput", tokens="output")
    assert found.value == pytest.approx(16 * 64 / 1.91234, rel=1e-4)
    assert bool(found.derived) == (version != "0.4.3")
    assert run.value("throughput", tokens="total") == pytest.approx(16 * 1088 / 1.91234, rel=1e-4)
    decode = run.value("decode_throughput")
    assert decode == (None if version == "0.4.3" else pytest.approx(16 * 64 / (1.91234 - 0.80421), rel=1e-4))
    if version in ("0.5.9", "0.5.23"):
        ttft = run.metric("ttft")
        assert (ttft.value, ttft.statistic, ttft.unit) == (804.2, "max", "ms")
        assert run.value("prefill_throughput") == pytest.approx(16 * 1024 / 0.80421, rel=1e-4)


def test_one_batch_server_that_does_not_know():
    known, unknown = load(DATA / "sglang_bench_one_batch_server_0.5.9.jsonl")
    assert (known.value("last_gen_throughput"), known.value("accept_length")) == (918.37, 1.0)
    assert (known.workload.prefix_cached, known.value("cache_hit_rate")) == (False, 0.0)
    assert unknown.value("last_gen_throughput") is unknown.value("accept_length") is None
    assert unknown.workload.prefix_cached is None
    listed = only(DATA / "sglang_bench_one_batch_server_0.5.9_list.json")
    assert listed.model == "deepseek-ai/DeepSeek-R1"
    assert listed.flags == ("--tp", "8", "--trust-remote-code")


def test_offline_throughput_tells_output_from_total():
    run = only(DATA / "sglang_bench_offline_throughput_0.4.3.jsonl")
    assert run.mode == "offline"
    assert run.value("throughput", tokens="total") == pytest.approx(2_000_000 / 437.2812)
    assert run.value("throughput", tokens="output") == pytest.approx(400_000 / 437.2812)
    assert run.value("throughput", tokens="input") == pytest.approx(1_600_000 / 437.2812)
    assert (run.engine, run.totals.completed, run.totals.failed) == ("sglang", 500, None)
    later = only(DATA / "sglang_bench_offline_throughput_0.5.9.jsonl")
    assert later.value("last_gen_throughput") == 2417.88


def test_vllm_throughput_is_of_input_and_output():
    run = only(DATA / "vllm_throughput_0.32.json")
    assert [m.tokens for m in run.metrics if m.name == "throughput"] == ["total"]
    assert run.value("throughput") == pytest.approx(run.value("tokens") / run.totals.duration_s)
    assert run.value("request_throughput") == pytest.approx(20 / 0.1234567)
    assert (run.mode, run.model, run.workload.num_prompts) == ("offline", "tiny", 20)


def test_vllm_latency_is_of_a_batch():
    run, (row,) = only(DATA / "vllm_latency_0.32.json"), rows(DATA / "vllm_latency_0.32.json")
    mean = run.metric("batch_latency", "mean")
    assert (mean.value, mean.unit, mean.scope) == (row["avg_latency"] * 1e3, "ms", "instance")
    for percent, seconds in row["percentiles"].items():
        assert run.value("batch_latency", f"p{percent}") == pytest.approx(seconds * 1e3)
    assert run.value("batch_latency", "max") == pytest.approx(max(row["latencies"]) * 1e3)
    assert run.extra["latencies_ms"] == pytest.approx([1e3 * one for one in row["latencies"]])
    assert run.value("e2e") is run.value("throughput") is None


def test_lines_of_several_clients_in_one_file(tmp_path):
    both = ("sglang_bench_one_batch_0.5.9.jsonl", "sglang_bench_one_batch_server_0.5.9.jsonl")
    text = "".join((DATA / name).read_text() for name in both)
    path = tmp_path / "result.jsonl"
    path.write_text(text)
    assert [run.client.split("_")[-1] for run in load(path)] == ["batch", "batch", "server", "server"]
    assert [run.source.split(":")[-1] for run in load(path)] == ["1", "2", "3", "4"]
    path.write_text(text + '{"something": "else"}\n')
    with pytest.raises(UnreadableError, match="line 5: of no known client"):
        load(path)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_any_one_key_may_be_missing(path, tmp_path):
    row = rows(path)[0][0] if isinstance(rows(path)[0], list) else rows(path)[0]
    for key in row:
        run = only(written(tmp_path, {k: v for k, v in row.items() if k != key}))
        assert run.client == FILES[path]
        assert run.metrics


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_number_that_is_none_is_left_out_and_flagged(path, tmp_path):
    row = rows(path)[0][0] if isinstance(rows(path)[0], list) else rows(path)[0]
    numbers = [k for k, v in row.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    before = only(written(tmp_path, row))
    turns = itertools.cycle(["12.5", math.nan, -math.inf, -1.5, True, [], {}, 1e300, 10**400])
    for key, wrong in zip([*numbers, *numbers[1:]], turns, strict=False):
        run = only(written(tmp_path, row | {key: wrong}))
        flagged = [f for f in run.findings if f.rule == "unreadable" and repr(key) in f.message]
        if key in before.extra:
            assert key in run.extra
        else:
            assert flagged, (key, wrong)
            assert all(f.severity == "wrong" for f in flagged)
            values = {(m.name, m.statistic, m.tokens): m.value for m in before.metrics}
            for one in run.metrics:
                if not one.derived:
                    assert values[(one.name, one.statistic, one.tokens)] == one.value


@pytest.mark.parametrize(
    "lists",
    [
        {"ttfts": [0.1, "0.2"]},
        {"ttfts": [0.1, -0.2]},
        {"ttfts": 0.1},
        {"itls": [[0.1], 0.2]},
        {"itls": [[0.1], [None]]},
        {"input_lens": [1.5] * 8},
        {"output_lens": [12] * 7},
        {"errors": [""] * 3},
        {"errors": {"0": "lost"}},
    ],
)
def test_lists_that_do_not_fit_are_left_out_and_flagged(lists, tmp_path):
    for name in ("sglang_bench_serving_0.5.9_details.jsonl", "vllm_serve_0.32_detailed.json"):
        (row,) = rows(DATA / name)
        run = only(written(tmp_path, row | lists))
        assert [f for f in run.findings if f.rule == "unreadable"]
        assert run.value("ttft", "mean") == row["mean_ttft_ms"]


def test_a_run_in_which_nothing_completed_has_no_latencies(tmp_path):
    (row,) = rows(DATA / "vllm_serve_0.32.json")
    zeros = {k: 0.0 for k in row if k.endswith("_ms")} | {
        "completed": 0,
        "failed": 32,
        "latencies": [0.0] * 32,
    }
    run = only(written(tmp_path, row | zeros))
    assert not [m for m in run.metrics if m.unit == "ms"]
    assert any("no request completed" in note for note in run.notes)


def test_a_row_with_no_number_left_names_what_is_missing(tmp_path):
    row = {
        "dataset_name": "random",
        "sharegpt_output_len": None,
        "random_range_ratio": 1.0,
        "backend": "sglang",
    }
    with pytest.raises(UnreadableError, match="duration, completed, output_throughput"):
        load(written(tmp_path, row))
    row = {"model_id": "x", "tokenizer_id": "x", "burstiness": 1.0, "duration": "abc"}
    with pytest.raises(UnreadableError, match="completed, output_throughput"):
        load(written(tmp_path, row))


def test_long_lists_of_a_client_are_named_not_kept(tmp_path):
    (row,) = rows(DATA / "vllm_serve_0.32.json")
    run = only(written(tmp_path, row | {"something_new": list(range(65)), "short": [1, 2]}))
    assert "something_new" not in run.extra
    assert run.extra["short"] == [1, 2]
    assert any("something_new (65 entries)" in note for note in run.notes)


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(JUNK)
def test_no_recogniser_trips_over_any_json(tmp_path_factory, junk):
    path = written(tmp_path_factory.mktemp("junk"), junk, "junk.json")
    try:
        document = read(path)
    except UnreadableError:
        return
    assert not any(one.recognises(document) for one in FORMATS)


KEYS = sorted({key for path in FILES for row in rows(path) if isinstance(row, dict) for key in row})


@given(st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=3, max_size=40))
def test_any_value_under_a_clients_keys_gives_runs_or_one_line(tmp_path_factory, row):
    path = written(tmp_path_factory.mktemp("junk"), row, "junk.json")
    try:
        runs = load(path)
    except UnreadableError as error:
        assert "\n" not in str(error)
        return
    for run in runs:
        run.model_dump_json()
