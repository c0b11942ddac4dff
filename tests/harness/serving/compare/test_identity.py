"""Identity: each field wrong once, each one unsaid, of a run beside the setting of a ledger's row."""

from typing import Any

import pytest

from harness.serving.compare.identity import FIELDS, Setting, differences, of_run
from harness.serving.schema import Metric, OfferedLoad, Parallelism, ServingRun, Totals

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
    ("load", offered(concurrency=15)), ("load", {"flags": ("--max-running-requests=4",)}),
    ("mode", {"mode": "offline", "workload": LOAD.model_copy(update={"num_prompts": None})}),
    ("nodes", {"nodes": 2}), ("launch of decode steps", {"flags": ("--cuda-graph-max-bs=8",)}),
    ("prefix caching", offered(prefix_cached=True)),
    ("input length", counted(input_tokens=160 * 64)), ("output length", counted(output_tokens=160 * 32)),
    ("input length", {"totals": Totals()} | offered(input_len=None, longest_input_len=8192)),
    ("output length", {"totals": Totals()} | offered(output_len=None, longest_output_len=512)),
    ("range of lengths", offered(range_ratio=1.0)),
    ("range of lengths", offered(range_ratio=None, dataset="sharegpt")),
    ("load", offered(request_rate=4.0)), ("load", offered(concurrency=None)),
    ("accounting window", offered(warmup_s=30.0)),
    ("load", offered(ramp_up="linear from 1 to 9 requests a second")),
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
    ("range of lengths", offered(range_ratio=None)), ("load", offered(concurrency=None, request_rate=None)),
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


def test_a_row_that_says_nothing_is_explained_by_nothing():
    needed = {name for name, field in FIELDS.items() if field.needed}
    assert needed - {"mode"} <= {each.name for each in differences(Setting(), RUN)}


@pytest.mark.parametrize("flags", [(), ("--max-running-requests=8",)])
def test_a_limit_of_the_server_counts_where_it_is_the_lower_one(flags):
    limited = {"flags": flags, **offered(concurrency=8.0, num_prompts=80)}
    rank = {"flags": ("--max-num-seqs=8",), "engine": "vllm", **over(dp=8)}
    assert of_run(RUN.model_copy(update=limited))["load"] == "8 in flight"
    assert of_run(RUN.model_copy(update=rank))["load"] == "16 in flight"  # 8 of each of 8 ranks
