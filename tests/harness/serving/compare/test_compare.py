"""`serving compare`: what may be set beside what, what has to be done first, and each reason why not."""

import json

import pytest

from harness.cli.serving.results import engines_of
from harness.cli.serving.results_display import _answer
from harness.errors import UsageError
from harness.serving.clients.load import beside_each_other
from harness.serving.compare.alike import Quantity, compare, default_metric, find, quantity_of
from harness.serving.compare.identity import SERVER, require_names, with_engine
from harness.serving.schema import Finding, Metric, OfferedLoad, Parallelism, ServingRun, Totals
from tests.support.serving_files import DATA, SGLANG_ROW, VLLM_ROW, changed, of

OUTPUT = Metric(name="throughput", value=800.0, unit="tok/s", scope="instance", tokens="output")
SERVED = OfferedLoad(dataset="random", input_len=3200, output_len=800, concurrency=128, prefix_cached=False)
RUN = ServingRun(
    id="a", client="sglang.bench_serving", source="a", hardware="H200", gpus=8, nodes=1, engine="sglang",
    version="0.5.7", model="deepseek-ai/DeepSeek-R1", precision="fp8 block-scale", mode="online",
    workload=SERVED,
)  # fmt: skip


def quantity(name="a", metric=OUTPUT, **changes) -> Quantity:
    return Quantity(RUN.model_copy(update={"id": name, **changes}), metric)


def metric(**changes) -> Metric:
    return OUTPUT.model_copy(update=changes)


def workload(**changes) -> OfferedLoad:
    return SERVED.model_copy(update=changes)


def aspects(found) -> list[str]:
    return [reason.aspect for reason in found.reasons]


def test_alike_but_for_the_hardware():
    found = compare(quantity(), quantity("b", hardware="MI300X", metric=metric(value=400.0)))
    assert (found.verdict, found.ratio, found.reasons) == ("alike", 2.0, ())
    assert found.differing == ("hardware: h200 against mi300x",)
    for first, second in ((0.0, 800.0), (800.0, 0.0)):
        found = compare(quantity(metric=metric(value=first)), quantity("b", metric=metric(value=second)))
        assert (found.verdict, found.ratio, aspects(found)) == ("refused", None, ["value"])


OF_24 = {"gpus": 40, "nodes": 5, "parallelism": Parallelism(prefill_gpus=16, decode_gpus=24)}
OF_32 = {"parallelism": Parallelism(prefill_gpus=8, decode_gpus=32)}


@pytest.mark.parametrize(("scope", "other", "values"), [
    ("decode_gpu", OF_32, (60.0, 80.0)), ("prefill_gpu", OF_32, (40.0, 20.0)),
    ("node", {"nodes": 10}, (12.5, 25.0)),
])  # fmt: skip
def test_of_another_share_of_all_gpus_each_number_is_brought_to_one(scope, other, values):
    """Where 24 of 40 decode, what one of them puts out is 24/40 of it over all."""
    split = OF_24 | {"metric": metric(value=100.0, scope=scope)}
    found = compare(quantity(**split), quantity("b", **split | other))
    assert (found.verdict, found.a.value, found.b.value) == ("normalised", *map(pytest.approx, values))
    assert compare(quantity(**split), quantity("b", **split)).verdict == "alike"
    unsaid = quantity("c", **split | {"nodes": None, "parallelism": Parallelism()})
    assert aspects(compare(quantity(**split), unsaid)) == ["scope"]


SPECULATES = {"extra": {"spec_method": "mtp"}}


@pytest.mark.parametrize(("aspect", "changes"), [
    ("metric", {"metric": metric(name="goodput")}), ("statistic", {"metric": metric(statistic="max")}),
    ("unit", {"metric": metric(unit="req/s")}), ("tokens", {"metric": metric(tokens="unknown")}),
    ("scope", {"metric": metric(scope="unknown")}), ("scope", {"metric": metric(scope="request")}),
    ("scope", {"metric": metric(scope="cluster"), "gpus": None}),
    ("mode", {"mode": "offline"}), ("mode", {"mode": "unknown"}), ("hardware", {"hardware": ""}),
    ("engine", {"engine": ""}), ("model", {"model": ""}), ("model", {"model": "Llama-3-70B"}),
    ("input length", {"workload": workload(input_len=1024)}),
    ("output length", {"workload": workload(output_len=1024)}),
    ("output length", {"workload": workload(output_len=None)}),
    ("load", {"workload": workload(concurrency=64)}), ("load", {"workload": workload(request_rate=4.0)}),
    ("dataset", {"workload": workload(dataset="sharegpt")}),
    ("prefix caching", {"workload": workload(prefix_cached=True)}),
    ("precision", {"precision": "ds_fp8_per_token"}), ("speculative decoding", SPECULATES),
    ("accounting window", {"workload": workload(warmup_s=120.0)}),
    ("numbers of B", {"findings": (Finding(rule="r", severity="wrong", message="it cannot be"),)}),
])  # fmt: skip
def test_each_unlikeness_refuses_by_its_name(aspect, changes):
    there = quantity("b", **changes)
    for found in (compare(quantity(), there), compare(there, quantity())):
        assert found.verdict == "refused" and found.ratio is None
        assert aspect.replace("B", "") in " ".join(aspects(found))


def test_a_run_that_speculates_is_compared_with_a_plain_one_only_if_the_user_insists():
    """Also where the plain one does not say that it is: many clients write the key only then."""
    accepted = Metric(name="accept_length", value=2.84, unit="1", statistic="mean")
    speculates = quantity("b", metrics=(accepted,))
    for plain in (quantity(), quantity(flags=("--tp 8",))):
        found = compare(plain, speculates)
        assert aspects(found) == ["speculative decoding"]
        assert "--despite 'speculative decoding' compares them" in found.reasons[0].text
        found = compare(plain, speculates, (), ["speculative decoding"])
        assert found.ratio == 1.0 and "2.84 tokens a step" in found.differing[0]
    others = [accepted.model_copy(update={"value": value}) for value in (2.85, 2.5)]
    near, far = (compare(speculates, quantity("c", metrics=(other,)), (), ["speculative decoding"])
                 for other in others)  # fmt: skip
    assert "accept length: 2.84 against 2.5, which the ratio holds, too" in far.uncertain
    assert not any("accept length" in line for line in near.uncertain)
    cached = {"workload": workload(prefix_cached=True)}
    assert compare(quantity(), quantity("b", **cached), (), ["prefix caching"]).ratio == 1.0
    with pytest.raises(UsageError, match="unknown property 'load' of --despite; properties: prefix"):
        require_names("--despite", ["load"], SERVER)


def test_every_reason_is_given_and_what_neither_says_is_not_alike():
    other = workload(input_len=512, output_len=512, num_prompts=9)
    found = compare(quantity(), quantity("b", mode="offline", workload=other))
    assert {"mode", "input length", "output length", "load"} <= set(aspects(found))
    assert aspects(compare(quantity(), quantity("b", metric=metric(tokens="unknown", scope="unknown")))) == [
        "tokens", "scope"]  # fmt: skip
    at_once = {"workload": workload(concurrency=None, request_rate=0, num_prompts=512)}
    assert compare(quantity(**at_once), quantity("b", **at_once)).verdict == "alike"
    open_ = {"workload": workload(output_len=None)}
    assert aspects(compare(quantity(**open_), quantity("b", **open_))) == ["output length"]
    assert compare(quantity(**open_), quantity("b", **open_), ["all"]).verdict == "alike"
    steady, bursts = (workload(request_rate=4, burstiness=shape) for shape in (1, 0.25))
    assert aspects(compare(quantity(workload=steady), quantity("b", workload=bursts))) == ["load"]
    assert compare(quantity(workload=steady), quantity("b", workload=workload(request_rate=4))).ratio


TOTAL = metric(tokens="total", value=4000.0)
TTFT = Metric(name="ttft", value=1.5, unit="s", scope="request", statistic="mean")


@pytest.mark.parametrize(("a", "b", "verdict", "first", "ratio"), [
    ({"metric": TOTAL}, {}, "normalised", 800.0, 1.0),  # by the lengths
    ({"metric": TOTAL, "metrics": (metric(value=777.0),)}, {}, "normalised", 777.0, 777 / 800),  # its own
    ({"metric": TOTAL}, {"metric": TOTAL}, "alike", 4000.0, 1.0),
    ({"metric": TTFT}, {"metric": TTFT.model_copy(update={"value": 750.0, "unit": "ms"})}, "normalised",
     1500.0, 2.0),
    ({"metric": TTFT}, {"metric": TTFT, "gpus": 16}, "alike", 1.5, 1.0),  # a latency is over no GPUs
])  # fmt: skip
def test_numbers_are_brought_to_one_kind(a, b, verdict, first, ratio):
    found = compare(quantity(**a), quantity("b", **b))
    assert (found.verdict, found.a.value) == (verdict, first)
    assert found.ratio == pytest.approx(ratio)


def test_gpus_are_divided_out_and_named():
    found = compare(quantity(), quantity("b", gpus=16, nodes=2))
    assert found.verdict == "normalised"
    assert (found.a.value, found.b.value, found.a.scope) == (100.0, 50.0, "gpu")
    assert found.differing == ("GPUs: 8 against 16", "nodes: 1 against 2")
    assert any("16 a GPU against 8" in line for line in found.uncertain)  # 128 in flight on each


def test_of_a_range_the_longest_alone_may_be_known():
    longest = {"input_len": None, "output_len": None, "longest_input_len": 1024, "longest_output_len": 1024}
    a, b = (quantity(name, workload=workload(**longest)) for name in "ab")
    assert compare(a, b).verdict == "alike"
    other = quantity("c", workload=workload(**longest | {"longest_input_len": 8192}))
    assert aspects(compare(a, other)) == ["input length"]
    near, far = (quantity("d", workload=workload(input_len=n, output_len=n)) for n in (922, 400))
    assert "input length: up to 1024 against 922" in compare(a, near).uncertain
    assert aspects(compare(far, a)) == ["input length", "output length"]


def test_what_was_served_counts_not_what_was_asked():
    """A shared-prefix client leaves random_input_len at its default."""
    counted = Totals(completed=500, input_tokens=1600000, output_tokens=400000)
    odd = quantity("b", totals=counted, workload=workload(input_len=1024, output_len=1024))
    assert compare(quantity(), odd).verdict == "alike"
    trimmed = quantity("b", totals=counted, workload=workload(input_len=1024, output_len=1024, warmup_s=60.0))
    assert "input length" in aspects(compare(quantity(), trimmed))  # totals of a window are no lengths


INFO = {
    "attention_backend": "flashmla", "max_prefill_tokens": 16384, "pid": 7, "nccl_port": 5, "log_file": "a",
    "internal_states": [{"memory": 3}], "start_time": 1.5, "hicache_ratio": 2.0, "model_path": "/m/R1",
}  # fmt: skip


def test_server_flags_that_differ_are_listed_and_run_time_state_is_not():
    a = quantity(flags=("--tp 8", "--port 2", "--deepep-mode=auto"), extra={"server_info": INFO})
    there = INFO | {"attention_backend": "triton", "pid": 8, "nccl_port": 6, "log_file": "b", "start_time": 2,
                    "internal_states": [], "hicache_ratio": 4.0, "model_path": "/n/R1"}  # fmt: skip
    flags = ("--enforce-eager", "--port 1", "--deepep-mode auto")
    b = quantity("b", flags=flags, extra={"server_info": there})
    assert compare(a, b).differing[-1] == (
        "flags that differ: tp 8 | unset, attention_backend flashmla | triton, hicache_ratio 2.0 | 4.0, "
        "enforce_eager unset | on"
    )
    assert "b does not say its server's flags" in compare(a, quantity("b")).uncertain
    noted = [{"max_num_seqs": number, "rtfx": 0.0} for number in ("256", "512")]
    both = [quantity(client="vllm.serve", extra=extra) for extra in noted]
    assert compare(*both).differing == ("flags that differ: max_num_seqs 256 | 512",)


@pytest.mark.parametrize(("name", "changes", "says"), [
    ("vllm_serve_0.32.json", {"num_speculative_tokens": "3"}, "speculative decoding (3 tokens drafted)"),
    ("vllm_serve_0.32.json", {"total_gpus": "16"}, "flags that differ: total_gpus unset | 16"),
    ("vllm_serve_0.32_detailed.json", {"gpu": "MI300X", "cuda_graph": "False"}, "cuda_graph unset | False"),
    ("trtllm_serve.json", {"tensor_parallel_size": "4"}, "tensor_parallel_size unset | 4"),
    ("vllm_serve_0.32.json", {"num_speculative_tokens": "3"}, "num_speculative_tokens unset | 3"),
    ("trtllm_bench.json", {"engine/backend": "TRT"}, "flags that differ: backend Pytorch | TRT"),
    ("trtllm_bench.json", {"decoding_stats": {"acceptance_length_percentiles": {"average": 2.3}}},
     "speculative decoding (2.3 tokens a step)"),
    ("trtllm_bench.json", {"engine/kv_cache_dtype": "FP8"}, "KV cache (fp8)"),
    ("vllm_serve_0.32.json", {"enable_prefix_caching": "false"}, "prefix caching (off)"),
    ("sglang_bench_serving_0.5.9.jsonl", {"server_info/model_path": "nvidia/DeepSeek-R1-FP4"}, "model: "),
    ("sglang_bench_offline_throughput_0.5.9.jsonl", {"backend": "runtime"}, "backend engine | runtime"),
    ("guidellm_0.7.3.json", {"benchmarks/0/config/warmup/percent": 0.1}, "warmup.percent unset | 0.1"),
    ("guidellm_0.3.1.json", {"benchmarks/0/request_loader/data": "a.json"}, "output_tokens=32 | a.json"),
    ("aiperf_0.13.0.json", {"input_config/endpoint/type": "completions"}, "endpoint.type chat | completions"),
    ("genai_perf.json", {"input_config/streaming": False}, "settings that differ: streaming on | unset"),
    ("inference_perf_0.7.0.json", {"successes/prompt_tokens/cached": 300.0}, "caching: off against hits"),
])  # fmt: skip
def test_what_files_say_of_server_and_client_is_not_passed_over(tmp_path, name, changes, says):
    """The files of clients, each with one thing changed that decides whether two runs are alike."""
    path = tmp_path / f"changed{name[name.rindex('.') :]}"
    path.write_text(json.dumps(changed(name, changes)))
    runs = of(name)[0], find(str(path))
    wanted = default_metric(*runs)
    found = compare(*(quantity_of(run, run.id, wanted) for run in runs), assumed=["all"])
    assert says in "\n".join([*(reason.text for reason in found.reasons), *found.differing, *found.uncertain])


def test_what_else_differs_is_named():
    a = quantity(environment={"X_Y": "0"}, protocol="vllm", image="one:1")
    b = quantity(
        "b", engine="vllm", version="0.11.2", environment={"X_Y": "1"}, parallelism=Parallelism(tp=8),
        model="deepseek-ai/DeepSeek-R1-0528", protocol="openai", image="two:2", client="vllm.serve",
    )  # fmt: skip
    text = "\n".join(compare(a, b).differing)
    for part in ("engine: sglang against vllm", "version: 0.5.7 against 0.11.2", "X_Y 0 | 1", "R1-0528",
                 "protocol: vllm against openai", "image: one:1 against two:2", "client"):  # fmt: skip
        assert part in text
    assert "a does not say, as the other does, its tensor parallelism (8)" in compare(a, b).uncertain[1]


def test_the_user_says_which_engine_answered(tmp_path, here):
    """`backend: vllm` is a protocol: the file does not tell the engine, and the user is asked for it."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.json"]
    paths[0].write_text(json.dumps(SGLANG_ROW | {"backend": "vllm"}) + "\n")
    paths[1].write_text(json.dumps(VLLM_ROW | {"backend": "vllm", "endpoint_type": "vllm"}))
    names, assume = [str(path) for path in paths], ["--assume", "hardware", "--assume", "model"]
    done = here("serving", "compare", *names, *assume)
    assert done.returncode == 1 and "--engine A=NAME or B=NAME tells it" in " ".join(done.stdout.split())
    done = here("serving", "compare", *names, *assume, "--engine", "SGLang", "--engine", "B=vllm")
    assert done.returncode == 0 and "engine: sglang against vllm" in done.stdout
    for wrong, says in (("vlm", "unknown engine 'vlm'; did you mean vllm"), ("C=vllm", "write NAME")):
        with pytest.raises(UsageError, match=says):
            engines_of([wrong])
    assert with_engine(RUN, "TensorRT-LLM").notes == ("--engine: trtllm; the file says sglang",)
    fronts = ["A=Dynamo-TRT", "B=moreh-vllm"]  # as InferenceX and a document name them
    assert engines_of(fronts) == {"A": "dynamo-trtllm", "B": "moreh-vllm"}


def test_which_of_several_numbers_counts():
    """Throughput where both have it; of one kind and scope the first."""
    others = (metric(value=9.0), metric(value=8.0, scope="gpu", tokens="total"))
    run = RUN.model_copy(update={"metrics": (TTFT, OUTPUT, *others)})
    less = run.model_copy(update={"metrics": (others[0].model_copy(update={"name": "goodput"}), TTFT)})
    assert [default_metric(run, other) for other in (run, less)] == ["throughput", "ttft"]
    assert quantity_of(run, "a", "throughput:total").metric.value == 8.0
    with pytest.raises(UsageError, match="unknown metric 'tpot' of a; metrics: ttft, throughput"):
        quantity_of(run, "a", "tpot")


def test_a_run_beside_itself_is_said_to_be_that(here):
    told = here("serving", "compare", "dstack.online:2", "dstack.online:2").stdout
    assert "every number is that of dstack.online:2: the same run again" in told
    twice = beside_each_other([RUN, RUN])
    assert [len(run.findings) for run in beside_each_other(twice)] == [0, 1]  # is told once


def test_runs_are_found_by_their_ids():
    path = str(DATA / "inferencex_api.json")  # counted from 1, or as `serving load` names them
    assert find(f"{path}[1]") == find(f"{path}:2") != find(f"{path}:1")
    assert find("dstack.online:2").configuration and find("moai-512-512-sharegpt").gpus == 40
    with pytest.raises(UsageError, match="neither a file nor the id of a published run"):
        find("dstack-4176")


def test_despite_a_field_that_neither_says_is_uncertain_not_different():
    run = find("tests/data/serving/link/c4.jsonl")
    quantity = quantity_of(run, "A", "throughput:output")
    comparison = compare(quantity, quantity, ["all"], ["precision"])
    assert not any("precision" in line for line in comparison.differing)
    assert any("precision" in line for line in comparison.uncertain)


@pytest.mark.parametrize(
    ("name", "said"), [("dstack.onlin:2", "such as dstack.online:2,"), ("tests/data", "it is a directory")]
)
def test_a_name_that_is_no_result_says_what_is_near(name, said):
    with pytest.raises(UsageError, match=said):
        find(name)


@pytest.mark.parametrize(("name", "unit", "ratio", "says"), [
    ("throughput", "tok/s", 1.14, "A is 1.14x as fast as B"),
    ("throughput", "tok/s", 0.5, "B is 2x as fast as A"),
    ("tpot", "ms", 1.25, "B takes 20 % less than A"), ("tpot", "ms", 0.8, "A takes 20 % less than B"),
])  # fmt: skip
def test_the_answer_says_which_is_better(name, unit, ratio, says):
    assert _answer(Metric(name=name, value=1.0, unit=unit), ratio) == f"{says} (one run each: no interval)"
