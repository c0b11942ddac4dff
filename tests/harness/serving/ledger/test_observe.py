"""What a user records: a prediction of the link, then what serving runs showed, in one row of a ledger."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli.serving import serving
from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.ledger.identity import FIELDS, NEEDED, differences
from harness.serving.ledger.ledger import Setting, read, rows
from harness.serving.ledger.observe import observation, observe, t_interval
from harness.serving.ledger.report import ledger_lines
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.forecast import record
from harness.serving.schema import Metric, OfferedLoad, Parallelism, ServingRun, Totals
from tests.support.serving_files import DATA, SGLANG_ROW, VLLM_ROW


def link(*words):
    serving(["link", "--concurrency", "16", *map(str, words)], standalone_mode=False)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    with pytest.raises(SystemExit, match="0"):
        link("--what-if", "fused_moe=1.3x", "--ledger", path, "--row", "moe")
    return path.read_text()


@pytest.fixture
def ledger(tmp_path, predicted):
    path = tmp_path / "ledger.jsonl"
    path.write_text(predicted)
    return path


def written(path: Path, row: dict[str, Any] = VLLM_ROW, **changes: Any) -> str:
    path.write_text(json.dumps(row | changes))
    assert load(str(path)), "not read"
    return str(path)


def test_predicted_then_observed(tmp_path, ledger, capsys):
    before = [written(tmp_path / f"a{i}.json", mean_tpot_ms=17.3 + i / 10) for i in range(4)]
    after = [written(tmp_path / f"b{i}.json", mean_tpot_ms=14.7 + i / 9) for i in range(4)]
    files = [f"--{side}={name}" for side, names in (("before", before), ("after", after)) for name in names]
    serving(["observe", str(ledger), "moe", "--assume=all", *files], standalone_mode=False)
    [row] = rows(read(ledger))
    found = {one.quantity: one for one in ledger_lines(row) if one.observation}
    assert set(found) == {"tpot", "ttft", "output_throughput"}
    tpot = found["tpot"]
    assert tpot.blind and tpot.verdict == "explained"
    assert tpot.observation.change == pytest.approx(-2.583, abs=0.001)
    assert tpot.observation.low < -2.583 < tpot.observation.high < -2.5
    assert found["ttft"].verdict in ("missed", "not resolved")
    assert not row.explanations
    assumed = "taken to be alike without being said: hardware, GPUs, precision"
    assert assumed in capsys.readouterr().out


def test_unlike_runs_are_refused_and_nothing_is_written(tmp_path, ledger):
    text = ledger.read_text()
    a, b = written(tmp_path / "a.json"), written(tmp_path / "b.json", mean_tpot_ms=9.0)
    copy = written(tmp_path / "c.json")
    lacks = dict.fromkeys(("mean_tpot_ms", "mean_ttft_ms", "output_throughput"))
    less = written(tmp_path / "d.json", **lacks)
    for row, before, after, assumed, says in (
        ("moe", [a], [a, a], ["all"], "1 runs before and 2 after"),
        ("mla", [a], [a], ["all"], "no row 'mla'; rows: moe"),
        ("moe", [a, copy], [b, b], ["all"], r"c.json is .*a.json again, by every number"),  # it counts once
        ("moe", [a], [less], ["all"], "none of tpot, ttft, output_throughput, .* is in all of these runs"),
        ("moe", [a], [b], ["weather"], f"'weather' names nothing; there are: all, {', '.join(FIELDS)}"),
        ("moe", [a], [b], [], r"no run of this row: the run does not say its hardware .*--assume"),
    ):
        with pytest.raises(UsageError, match=says):
            observe(ledger, row, before, after, assumed=assumed)
    with pytest.raises(UsageError, match="has a row 'moe' already"):
        record(ledger, "moe", None, (), [SimpleNamespace(load=ClosedLoop(1024, 1024, 16))])
    with pytest.raises(UsageError, match="--what-if"):
        link("--ledger", ledger, "--row", "x")
    assert ledger.read_text() == text


def test_throughput_a_gpu_is_observed_of_the_instance(tmp_path, ledger):
    """InferenceX's files are per GPU; what was predicted is not."""
    row = json.loads((DATA / "inferencex_agg.json").read_text()) | {"conc": 16}
    a, b = (written(tmp_path / f"{us}.json", row, output_tput_per_gpu=us) for us in (100.0, 110.0))
    observe(ledger, "moe", [a], [b], assumed=["all"])
    seen = {one.observation.quantity: one.observation for one in rows(read(ledger))[0].observations}
    found = seen["output_throughput"]
    assert (found.before, found.after) == pytest.approx((800.0, 880.0))


def test_students_interval():
    mean, half = t_interval([1.0, 2.0, 3.0, 4.0])
    assert (mean, half) == (2.5, pytest.approx(2.3534 * 1.29099 / 2, rel=1e-4))
    assert t_interval([1.0]) == (1.0, None)


# A prediction is held against runs of its own setting alone: each field wrong once, and each one unsaid


LOAD = OfferedLoad(
    input_len=922, output_len=922, range_ratio=0.8, concurrency=16, request_rate=0.0, num_prompts=160
)
EACH = Parallelism(tp=8, pp=1, ep=1, dp=1)
SETTING = Setting(
    hardware="h200", gpus=8, engine="sglang", version="0.5.9", model="DeepSeek-R1",
    precision="fp8 block-scale", kv_cache="bfloat16", plain=True, launch="graph", recv_interval=1,
    prefill_tokens=8192, parallelism=EACH, workload=LOAD,
)  # fmt: skip
RUN = ServingRun(
    id="a.json", client="sglang.bench_serving", source="a.json", hardware="NVIDIA H200", gpus=8,
    engine="SGLang", version="v0.5.9", model="/models/DeepSeek-R1-0528",
    flags=("--kv-cache-dtype auto", "--chunked-prefill-size 8192"), parallelism=EACH, mode="online",
    workload=LOAD,
    totals=Totals(duration_s=60, completed=160, failed=0, input_tokens=147_600, output_tokens=147_500),
)  # fmt: skip


OUTPUT = Metric(name="throughput", value=80.0, unit="tok/s", scope="gpu", tokens="output")


@pytest.mark.parametrize(("changes", "says"), [
    ({"mode": "offline"}, "are not alike in output_throughput: .*mode"),
    ({"metrics": (OUTPUT.model_copy(update={"scope": "instance"}),)}, "they need normalising"),
    ({"gpus": None}, "a.json and b.json do not say of how many GPUs their output_throughput is"),
])  # fmt: skip
def test_a_pair_has_to_be_of_one_kind(changes, says):
    a = RUN.model_copy(update={"metrics": (OUTPUT,)})
    with pytest.raises(UsageError, match=says):
        observation("output_throughput", [(a, a.model_copy(update={"id": "b.json"} | changes))])
    assert observation("tpot", [(a, a)]) is None


def test_latencies_are_the_means_that_clients_report():
    kinds = itertools.product(("itl", "e2e", "ttft", "tpot"), ("median", "mean"))
    metrics = [Metric(name=name, value=n, unit="ms", scope="request", statistic=which)
               for n, (name, which) in enumerate(kinds, 1)]  # fmt: skip
    run = RUN.model_copy(update={"metrics": tuple(metrics)})
    assert [observation(name, [(run, run)]).before for name in ("itl", "e2e", "ttft", "tpot")] == [2, 4, 6, 8]


def offered(**changes: Any) -> dict[str, Any]:
    return {"workload": LOAD.model_copy(update=changes)}


def counted(**changes: Any) -> dict[str, Any]:
    return {"totals": RUN.totals.model_copy(update=changes)}


def over(**changes: Any) -> dict[str, Any]:
    return {"parallelism": RUN.parallelism.model_copy(update=changes)}


ACCEPTED = Metric(name="accept_length", value=2.6, unit="1", statistic="mean")
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("hardware", {"hardware": "H20"}), ("GPUs", {"gpus": 16}), ("engine", {"engine": "vllm"}),
    ("version", {"version": "0.5.23"}), ("version", {"version": "", "image": "lmsysorg/sglang:v0.4.3-cu124"}),
    ("model", {"model": "DeepSeek-V3.2"}), ("model", {"model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}),
    ("precision", {"precision": "nvfp4"}), ("KV cache", {"flags": ("--kv-cache-dtype fp8_e4m3",)}),
    ("tensor parallelism", over(tp=4)), ("expert parallelism", over(ep=8)),
    ("data parallelism", over(dp=8)), ("DP attention", over(dp_attention=True)),
    ("pipeline parallelism", over(pp=2)), ("context parallelism", {"extra": {"dcp_size": 2}}),
    ("disaggregation", over(prefill_gpus=8, decode_gpus=8)), ("disaggregation", {"extra": {"disagg": True}}),
    ("speculative decoding", {"flags": ("--speculative-algorithm=EAGLE",)}),
    ("speculative decoding", {"extra": {"spec_decoding": "mtp"}}),
    ("speculative decoding", {"metrics": (ACCEPTED,)}),
    ("launch of decode steps", {"flags": ("--disable-cuda-graph",)}),
    ("steps between looks", {"flags": ("--scheduler-recv-interval=30",)}),
    ("tokens of a prefill step", {"flags": ("--chunked-prefill-size=2048",)}),
    ("mode", {"mode": "offline"}), ("concurrency", offered(concurrency=15)),
    ("input length", counted(input_tokens=160 * 64)), ("output length", counted(output_tokens=160 * 32)),
    ("input length", {"totals": Totals()} | offered(input_len=None, longest_input_len=8192)),
    ("output length", {"totals": Totals()} | offered(output_len=None, longest_output_len=512)),
    ("range of lengths", offered(range_ratio=1.0)),
    ("range of lengths", offered(range_ratio=None, dataset="sharegpt")),
    ("request rate", offered(request_rate=4.0)), ("accounting window", offered(warmup_s=30.0)),
    ("ramp-up", offered(ramp_up="linear from 1 to 9 requests a second")),
    ("failed requests", counted(failed=3, completed=157)),
    ("failed requests", counted(failed=None, completed=150, input_tokens=138_375, output_tokens=138_375)),
    ("prompts for each place",
     offered(num_prompts=32) | counted(completed=32, input_tokens=29_520, output_tokens=29_500)),
    # As vLLM's --metadata has a client write it down
    ("hardware", {"hardware": "", "extra": {"gpu": "MI300X"}}),
    ("KV cache", {"flags": (), "extra": {"kv_cache_dtype": "fp8"}}),
    ("launch of decode steps", {"flags": (), "extra": {"enforce_eager": "True"}}),
    ("speculative decoding", {"flags": (), "extra": {"speculative_config": '{"method": "mtp"}'}}),
    ("expert parallelism", over(ep=None) | {"extra": {"enable_expert_parallel": "True"}}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "changes"), WRONG)
def test_one_field_that_differs_refuses_whatever_is_assumed(field, changes):
    found = differences(SETTING, RUN.model_copy(update=changes), ["all"])
    assert [each.name for each in found] == [field]


UNSAID: list[tuple[str, dict[str, Any]]] = [
    ("hardware", {"hardware": ""}), ("GPUs", {"gpus": None}), ("engine", {"engine": ""}),
    ("version", {"version": ""}), ("model", {"model": ""}), ("mode", {"mode": "unknown"}),
    ("tensor parallelism", over(tp=None)), ("expert parallelism", over(ep=None)),
    ("data parallelism", over(dp=None)), ("pipeline parallelism", over(pp=None)),
    ("range of lengths", offered(range_ratio=None)), ("concurrency", offered(concurrency=None)),
    ("request rate", offered(request_rate=None)),
    ("failed requests", offered(num_prompts=None) | counted(failed=None)),
    ("prompts for each place", offered(num_prompts=None) | counted(completed=None)),
    # Without its server's flags
    *[(field, {"flags": ()}) for field in ("speculative decoding", "disaggregation", "launch of decode steps",
                                           "steps between looks", "tokens of a prefill step")],
    ("DP attention", {"flags": ()} | over(dp=None)),
]  # fmt: skip


def test_what_a_run_says_by_other_means_need_not_be_assumed():
    """Another spelling; without flags InferenceX's keys, one rank, an engine without such a scheduler."""
    assert differences(SETTING, RUN) == []
    says = {"spec_decoding": "none", "disagg": False, "enforce_eager": "False", "dcp_size": "0"}
    alone = ACCEPTED.model_copy(update={"value": 1.0})
    run = RUN.model_copy(update={"flags": (), "extra": says, "engine": "vllm", "metrics": (alone,)})
    unsaid = dict.fromkeys(("precision", "KV cache", "tokens of a prefill step"), False)
    assert {each.name: each.is_known for each in differences(SETTING, run)} == unsaid | {"engine": True}


@pytest.mark.parametrize(("field", "changes"), UNSAID)
def test_one_field_that_is_not_said_refuses_unless_it_is_assumed(field, changes):
    run = RUN.model_copy(update=changes)
    assert field in [each.name for each in differences(SETTING, run)]
    assert field not in [each.name for each in differences(SETTING, run, [field])]
    assert differences(SETTING, run, ["all"]) == []


@pytest.mark.parametrize("field", NEEDED)
def test_a_row_that_says_nothing_is_explained_by_nothing(field):
    assert field in [each.name for each in differences(Setting(), RUN)]


# Through the clients' files

RAMP = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9}
IN_FILES = [
    (VLLM_ROW, {"model_id": "deepseek-ai/DeepSeek-V2-Lite"}, "model"),
    (VLLM_ROW, {"backend": "lmdeploy", "endpoint_type": "lmdeploy"}, "engine"),
    (VLLM_ROW, RAMP, "ramp-up linear from 1 to 9 requests a second"),
    (SGLANG_ROW, {"total_input_tokens": 160 * 64}, "input length"),
    (SGLANG_ROW, {"completed": 150}, "failed requests"),
]


@pytest.mark.parametrize("row", [VLLM_ROW, SGLANG_ROW], ids=["vllm", "sglang"])
def test_what_was_assumed_is_written_down(tmp_path, ledger, row):
    before, after = written(tmp_path / "a.json", row), written(tmp_path / "b.json", row, mean_tpot_ms=9.0)
    observe(ledger, "moe", [before], [after], assumed=["all"])
    [seen] = rows(read(ledger))
    assumed = seen.observations[0].observation.assumed
    assert {"hardware", "GPUs", "tensor parallelism"} <= set(assumed)
    assert not {"concurrency", "input length", "output length"} & set(assumed)


@pytest.mark.parametrize(("row", "changes", "field"), IN_FILES)
def test_a_file_of_another_setting_is_refused(tmp_path, ledger, row, changes, field):
    text = ledger.read_text()
    here, there = written(tmp_path / "a.json", row), written(tmp_path / "b.json", row, **changes)
    for pair in (([here], [there]), ([there], [there])):
        with pytest.raises(UsageError, match=f"is no run of this row: .*{field}"):
            observe(ledger, "moe", *pair, assumed=["all"])
    assert ledger.read_text() == text


def test_two_releases_differ_in_more_than_the_change(tmp_path, ledger):
    def of(name: str, version: str) -> str:
        info = {"tp_size": 8, "pp_size": 1, "dp_size": 1, "ep_size": 1, "version": version}
        return written(tmp_path / name, SGLANG_ROW, server_info=info, mean_tpot_ms=10.0 + len(name))

    old, new, built = of("a.json", "0.5.8"), of("ab.json", "0.5.9"), of("abc.json", "0.5.9.post1")
    with pytest.raises(UsageError, match=r"is of sglang 0.5.8, .* of 0.5.9: between two releases"):
        observe(ledger, "moe", [old], [new], assumed=["all"])
    observe(ledger, "moe", [new], [built], assumed=["all"])
