"""Runs and changes that readers noted from published documents: what their words are taken for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_files import DATA, changed, noted, of, rules, shapes

from harness.errors import OK
from harness.serving import load
from harness.serving.load_command import show
from harness.serving.reading import UnreadableError

RUNS, POINTS = "document_runs.json", "published_ab_points.json"


@pytest.fixture(scope="module")
def rows():
    return {run.id: run for run in of(RUNS)}


@pytest.fixture(scope="module")
def points():
    return {run.id: run for run in of(POINTS)}


def row_changed(tmp_path, name, **values):
    """The run of that row with other values under its keys."""

    def change(content):
        next(row for row in content["runs"] if row["id"] == name).update(values)

    return next(run for run in changed(tmp_path, RUNS, change) if run.id == name)


def test_all_rows_load_under_their_own_ids_and_by_kind(rows):
    noted_rows = json.loads((DATA / RUNS).read_text())["runs"]
    assert list(rows) == [row["id"] for row in noted_rows]
    assert len(rows) == 51
    kinds = [run.client.removeprefix("document_runs.") for run in rows.values()]
    assert kinds == [row["kind"].split()[0] for row in noted_rows]
    assert not [f for run in rows.values() for f in run.findings if f.severity == "wrong"]
    suspect = {run.id: rules(run) for run in rows.values() if rules(run)}
    assert suspect == {"moai-2000-2000-sharegpt": ["command", "command"]}  # 250 / 290 s asked, 300 / 230 done


def test_nothing_of_a_row_is_lost(rows):
    """Each value stands in its own place or in `extra`."""
    for row in json.loads((DATA / RUNS).read_text())["runs"]:
        run = rows[row["id"]]
        kept = json.dumps(run.model_dump(mode="json"))
        for key in (
            "note",
            "metric",
            "scope",
            "token_scope",
            "mode",
            "document",
            "raw_match",
            "rocm",
            "date",
        ):
            assert not row.get(key) or json.dumps(row[key])[1:-1] in kept, (run.id, key)
        assert run.extra.get("derived") == row.get("derived")
        if isinstance(row.get("value"), (int, float)):
            assert row["value"] in [m.value / (1e3 if m.name == "e2e" else 1) for m in run.metrics], run.id
        else:
            assert bool(run.metrics) == ("value" in row)


def test_a_measured_row_of_mi350x(rows):
    run = rows["mi350x-vllm-c4"]
    assert (run.hardware, run.gpus, run.nodes) == ("AMD Instinct MI350X", 8, 1)
    assert (run.engine, run.version) == ("vllm", "0.11.2 (V1)")
    assert run.image == "rocm/vllm:rocm7.0.0_vllm_0.11.2_20251210"
    assert run.flags[0] == "--tensor-parallel-size 8"
    assert run.flags[1] == "--trust-remote-code"
    assert run.flags[-1] == "--dtype auto"
    assert len(run.flags) == 12
    assert run.environment["VLLM_ROCM_USE_AITER_PAGED_ATTN"] == "0"
    assert run.parallelism.tp == 8
    assert run.mode == "unknown"
    asked = run.workload
    assert (asked.input_len, asked.output_len, asked.concurrency, asked.num_prompts) == (None, 512, 4, 4)
    assert asked.dataset == ""
    assert (run.totals.duration_s, run.totals.output_tokens) == (16.94, 2048)
    assert shapes(run) == {("throughput", "total", "unknown"): (120.88, "tok/s", "node")}
    assert "output? (total tokens generated)" == run.extra["token_scope"]
    assert run.extra["hardware"] == {"vram_label": "288 GB (=288 GiB=309 GB)"}


def test_single_numbers_of_mi350x(rows):
    def only(name):
        (one,) = rows[name].metrics
        return one.name, one.value, one.unit, one.scope, one.tokens, one.statistic

    assert only("mi350x-peak-server") == ("throughput", 2339, "tok/s", "node", "unknown", "max")
    assert only("mi350x-per-gpu") == ("throughput", 332, "tok/s", "gpu", "unknown", "total")
    assert only("mi350x-single-lat") == ("e2e", 22000, "ms", "request", "none", "total")
    assert only("mi350x-single-tput") == ("throughput", 46, "tok/s", "request", "unknown", "total")
    assert only("mi350x-mem") == ("memory", 81.7, "GiB", "gpu", "none", "total")
    assert only("mi350x-load") == ("load", 394.9, "s", "node", "none", "total")


def test_what_a_comparison_table_mixes(rows):
    """One column: all tokens of a node, output tokens of a GPU, and what nobody says."""
    said = {}
    for name, run in rows.items():
        if name.startswith("cmp-"):
            (one,) = run.metrics
            said[name] = (one.value, one.tokens, one.scope, run.hardware, run.gpus, run.engine, run.version)
    assert list(said.values()) == [
        (2656, "output", "node", "MI350X", 8, "vllm", "V1"),
        (2200, "output", "gpu", "H200", 8, "vllm", ""),
        (4176, "total", "node", "H200", 8, "tensorrt-llm", ""),
        (6311, "total", "node", "H200", 8, "sglang", ""),
        (3872, "unknown", "node", "HGX H200", None, "nim", ""),
        (4574, "total", "node", "MI300X", 8, "vllm", ""),
    ]


@pytest.mark.parametrize(
    "name, total, output, mode",
    [
        ("dstack-4176", 4176, 835.2, "online"),
        ("dstack-6311", 6311, 1262.2, "offline"),
        ("dstack-4574", 4574, 914.8, "online"),
    ],
)
def test_dstacks_headlines_are_of_all_tokens(rows, name, total, output, mode):
    run = rows[name]
    headline, derived = run.metrics
    assert (headline.value, headline.tokens, headline.scope) == (total, "total", "node")
    assert (derived.value, derived.tokens, derived.scope) == (output, "output", "node")
    assert not headline.derived
    assert derived.derived
    assert run.mode == mode


def test_a_log_of_moai_with_its_window(rows):
    run = rows["moai-512-512-gutenberg"]
    assert (run.engine, run.version) == ("moai", "Odin 0.6.1/Heimdall 0.5.0, Moreh vLLM vllm_251212")
    assert (run.gpus, run.nodes, run.mode) == (40, 5, "online")
    assert (run.parallelism.prefill_gpus, run.parallelism.decode_gpus) == (16, 24)
    asked = run.workload
    assert (asked.input_len, asked.output_len, asked.concurrency) == (512, 512, 10800)
    assert (asked.request_rate, asked.num_prompts, asked.dataset) == (140, 32400, "gutenberg")
    assert (asked.warmup_s, asked.cooldown_s) == (130, 70)
    assert run.totals.model_dump() == {
        "duration_s": 110.69, "completed": 3186, "failed": None,
        "input_tokens": 1631232, "output_tokens": 7161008,
    }  # fmt: skip
    found = shapes(run)
    assert found["throughput", "total", "output"] == (64695.1, "tok/s", "cluster")
    assert found["throughput", "total", "total"] == (79432.24, "tok/s", "cluster")
    assert found["ttft", "mean", "none"] == (1774.9, "ms", "request")
    assert found["itl", "p90", "none"] == (189.84, "ms", "request")
    assert len(found) == 2 + 8 + 8
    assert run.extra["log"] == {"Number of worker processes": 25.0}
    assert run.extra["workload"] == {"warmup_cmd_s": 130, "cooldown_cmd_s": 70}
    assert rules(run) == []
    assert set(noted(run)) == {"output_length", "completed"}
    assert any(note.startswith("of the window") for note in run.notes)
    assert not any("2048" in flag and "max-num-batched" in flag for flag in run.flags)
    assert "--max-num-seqs 2048" in run.flags
    assert rows["moai-2000-100-prefix-cached"].workload.prefix_cached


def test_cited_numbers_per_decode_node(rows):
    for name, value in (("22300", 22300), ("14800", 14800), ("14300", 14300), ("21224", 21224)):
        (one,) = rows[f"moai-cited-{name}"].metrics
        assert (one.value, one.scope, one.tokens) == (value, "decode_node", "output")
    assert rows["moai-cited-14300"].metrics[0].statistic == "max"  # "up to"


def test_claims_keep_their_bounds(rows):
    def all_of(name):
        return [(m.name, m.value, m.unit, m.statistic) for m in rows[f"amd-blog-{name}"].metrics]

    ratio = all_of("throughput-at-same-latency-vs-h200")
    assert ratio == [("throughput_ratio", 2, "1", "min"), ("throughput_ratio", 5, "1", "max")]
    gain = all_of("throughput-at-same-concurrency-vs-h200")
    assert gain == [("throughput_gain", 75, "%", "max")]
    assert all_of("latency-at-same-concurrency-vs-h200") == [("latency_change", -60, "%", "min")]
    assert all_of("aiter-mla-decode-speedup") == [("speedup", 17, "1", "max")]
    (one,) = rows["amd-blog-aiter-mla-decode-speedup"].metrics
    assert one.label == "AITER MLA decode speedup: up to 17"


def test_a_configuration_has_no_number(rows):
    run = rows["amd-blog-cfg-8xH200"]
    assert run.metrics == ()
    assert run.workload.concurrency is None
    assert "128, 64, 32, 16, 8, 4, 2, 1" in run.notes[-1]
    assert run.extra["workload"] == {"concurrency": [128, 64, 32, 16, 8, 4, 2, 1]}
    assert run.environment == {"SGL_ENABLE_JIT_DEEPGEMM": "1"}
    converted = rows["dstack-cfg-tensorrt-llm-h200"]
    assert converted.engine == "TensorRT"
    assert converted.flags[:2] == ("--dtype bfloat16", "--tp_size 8")
    assert "convert ; trtllm-build" in converted.notes[0]


def test_unknown_words_are_left_open_and_quoted(tmp_path):
    words = {"scope": "per rack", "token_scope": "accepted", "mode": "burst", "parallel": "CP4"}
    run = row_changed(tmp_path, "mi350x-vllm-c4", **words)
    (one,) = run.metrics
    assert (one.scope, run.mode, run.parallelism.tp) == ("unknown", "unknown", None)
    for word in words.values():
        assert sum(repr(word) in note for note in run.notes) == 1
        assert word in run.extra.values()


@pytest.mark.parametrize("value", ["many", "about 17", "up to", "17", "-5", "2-", True, [1], {"a": 1}])
def test_a_value_that_is_no_number_is_left_out(tmp_path, value):
    run = row_changed(tmp_path, "amd-blog-aiter-mla-decode-speedup", value=value)
    assert run.metrics == ()
    assert rules(run) == ["unreadable"]
    assert "'value'" in run.findings[0].message


@pytest.mark.parametrize("unit", ["tok/min", "k tok/s", "ms", "", None])
def test_a_throughput_in_an_unknown_unit_is_left_out(tmp_path, unit):
    run = row_changed(tmp_path, "mi350x-vllm-c4", unit=unit)
    assert run.metrics == ()
    assert rules(run) == ["unreadable"]


def test_a_throughput_of_unsaid_tokens_is_of_one_of_the_counts(tmp_path):
    assert rules(row_changed(tmp_path, "mi350x-vllm-c4", value=241.76)) == ["throughput"]
    assert rules(row_changed(tmp_path, "mi350x-vllm-c4", value=120.9)) == []


def test_a_row_that_contradicts_its_log(tmp_path):
    run = row_changed(tmp_path, "moai-512-512-gutenberg", value=64000.0)
    assert rules(run)[0] == "log"
    assert "64000" in run.findings[0].message


def test_a_label_that_contradicts_the_count(tmp_path):
    run = row_changed(tmp_path, "amd-blog-cfg-8xH200", hardware={"label": "8xH200", "n_gpus": 16})
    assert rules(run) == ["command"]
    assert run.gpus == 16


@pytest.mark.parametrize("content", [{"schema": "document_runs/2", "runs": []}, {"schema": "document_runs/1"},
                                     {"schema": "document_runs/1", "runs": [3]},
                                     {"schema": "document_runs/1", "runs": []}])  # fmt: skip
def test_another_schema_or_no_rows_is_one_line(tmp_path, content):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UnreadableError, match="cannot read"):
        load(path)


def test_every_entry_of_the_changes_is_there(points):
    assert len(points) == 2 + 8 + 2 + 2 + 2 + 4 + 1 + 1
    assert not [one for run in points.values() for one in run.findings if one.severity != "note"]
    sources = {entry["src"] for entry in json.loads((DATA / POINTS).read_text())}
    assert {run.source for run in points.values()} == sources


def test_a_change_of_one_batch_in_ms(points):
    run = points["aiter-sglang044:before"]
    assert (run.hardware, run.gpus, run.parallelism.tp, run.engine) == ("MI300X", 8, 8, "sglang")
    asked = run.workload
    assert (asked.num_prompts, asked.input_len, asked.output_len) == (64, 512, 32)
    assert run.mode == "offline"
    assert run.label == "before: AITER_MOE=1 (MoE+GEMM+MLA+MHA+allreduce)"
    assert shapes(run) == {
        ("prefill", "total", "none"): (pytest.approx(3126.78), "ms", "instance"),
        ("decode_step", "median", "none"): (53.19, "ms", "instance"),
        ("throughput", "total", "total"): (7332.02, "tok/s", "instance"),
    }
    assert points["aiter-sglang044:after"].value("decode_step") == 28.37


def test_a_change_at_several_concurrencies(points):
    before, after = points["aiter-1930:c=4:before"], points["aiter-1930:c=4:after"]
    assert shapes(before) == {("tpot", "median", "none"): (28.76, "ms", "request")}
    assert shapes(after) == {("tpot", "median", "none"): (22.05, "ms", "request")}
    assert (before.workload.concurrency, points["aiter-1930:c=32:after"].workload.concurrency) == (4, 32)
    assert before.workload.input_len is None
    assert "1k/1k" in before.notes[0]
    assert before.extra["implied_saving_us_per_call"] == [110.0, 190.7, 267.9, 201.6]
    assert points["aiter-1930:c=32:after"].value("tpot") == 34.3


def test_changes_that_say_less(points):
    run = points["sglang-3237:after"]
    assert (run.gpus, run.hardware, run.parallelism.tp, run.model) == (8, "", 8, "DeepSeek-V3")
    assert "names no GPU" in run.notes[0]
    run = points["sglang-2735:before"]
    assert (run.workload.dataset, run.workload.num_prompts, run.workload.concurrency) == ("gsm8k", 2000, 2000)
    assert shapes(run) == {("throughput", "total", "output"): (1676.993, "tok/s", "instance")}
    assert points["sglang-22938:after"].value("throughput") == 894.79
    assert points["sglang-22938:after"].parallelism.tp is None


def test_an_anchor_is_per_gpu(points):
    run = points["inferencex-870:c=64"]
    assert (run.hardware, run.gpus, run.engine, run.version) == ("H200", 8, "sglang", "0.5.7")
    assert shapes(run) == {
        ("ttft", "unknown", "none"): (423.1, "ms", "request"),
        ("tpot", "unknown", "none"): (34.6, "ms", "request"),
        ("itl", "unknown", "none"): (344.8, "ms", "request"),
        ("throughput", "total", "output"): (223.6, "tok/s", "gpu"),
    }
    assert "stream-interval 10" in run.extra["note"]


def test_shares_and_calls_of_a_trace(points, tmp_path):
    run = points["inferencex-1005"]
    assert (run.hardware, run.gpus, run.precision, run.workload.concurrency) == ("MI355X", 4, "fp4", 16)
    assert run.value("share of moe_gemm") == pytest.approx(0.345)
    assert sum(one.value for one in run.metrics) == pytest.approx(1.0)
    calls = points["inferencex-863-mi325x"]
    assert calls.value("q_a per call") == pytest.approx(0.123)
    assert calls.value("share of dense_gemm") == pytest.approx(0.326)
    assert calls.extra["counts"] == {"attn": 61, "moe": 58, "dense": 3}
    assert "LLM-written" in calls.label

    def less(content):
        del content[6]["shares_pct"]["mla"]

    run = next(run for run in changed(tmp_path, POINTS, less) if run.id == "inferencex-1005")
    assert noted(run) == ["shares"]


def test_a_time_of_no_named_latency_is_left_out(tmp_path):
    def change(content):
        content[1]["tool"] = "serving"

    runs = [run for run in changed(tmp_path, POINTS, change) if run.id.startswith("aiter-1930")]
    assert len(runs) == 8
    assert all(run.metrics == () and rules(run) == ["unreadable"] for run in runs)


def test_a_missing_side_is_reported(tmp_path):
    def change(content):
        del content[0]["after"]

    before, after = changed(tmp_path, POINTS, change)[:2]
    assert (rules(before), rules(after)) == ([], ["unreadable"])
    assert before.metrics
    assert after.metrics == ()


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text("8x TP-(2", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = sorted({key for row in json.loads((DATA / RUNS).read_text())["runs"] for key in row})
ENTRY = sorted({key for row in json.loads((DATA / POINTS).read_text()) for key in row})


@given(
    st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=12), st.dictionaries(st.sampled_from(ENTRY), JUNK)
)
def test_any_value_under_their_keys_gives_runs_or_one_line(tmp_path_factory, row, entry):
    folder = tmp_path_factory.mktemp("junk")
    for name, content in (
        ("runs.json", {"schema": "document_runs/1", "runs": [row]}),
        ("points.json", [{"id": "a", "src": "b", "hw": "c", "before": {}} | entry]),
    ):
        (folder / name).write_text(json.dumps(content))
        try:
            assert load(folder / name)
        except UnreadableError as error:
            assert "\n" not in str(error)


def test_the_command_shows_what_has_no_column(capsys):
    assert show([str(DATA / RUNS), str(DATA / POINTS)], None, None) == OK
    text = capsys.readouterr().out
    assert "speedup up to 17" in text
    assert "28.76 median" in text
    assert "12.8 ?" in text
