"""`serving compare`: what may be set beside what, what has to be done first, and each reason why not."""

import pytest

from harness.serving.compare.alike import compare
from harness.serving.compare.quantity import Quantity, option, quantity_of_run
from harness.serving.compare.select import default_metric
from harness.serving.compare.sourced import by_kind, prints, same_engine, same_hardware, sourced
from harness.serving.published.index import known_by_id
from harness.serving.schema import Metric, OfferedLoad, Parallelism, ServingRun, Totals

KNOWN = known_by_id()
OUTPUT = Metric(name="throughput", value=800.0, unit="tok/s", scope="instance", tokens="output")
SERVED = OfferedLoad(dataset="random", input_len=3200, output_len=800, concurrency=128, prefix_cached=False)


def figure(name="a", **changes) -> Quantity:
    values = {
        "metric": OUTPUT, "hardware": "H200", "gpus": 8, "nodes": 1, "engine": "sglang", "version": "0.5.7",
        "client": "sglang.bench_serving", "model": "deepseek-ai/DeepSeek-R1", "precision": "fp8 block-scale",
        "mode": "online", "workload": SERVED,
    }  # fmt: skip
    return Quantity(id=name, **{**values, **changes})


def metric(**changes) -> Metric:
    return OUTPUT.model_copy(update=changes)


def workload(**changes) -> OfferedLoad:
    return SERVED.model_copy(update=changes)


def aspects(found) -> list[str]:
    return [reason.aspect for reason in found.reasons]


def test_alike_but_for_the_hardware():
    found = compare(figure(), figure("b", hardware="MI300X", metric=metric(value=400.0)))
    assert (found.verdict, found.ratio, found.reasons) == ("alike", 2.0, ())
    assert found.confounders == () and found.uncertain == ()
    for first, second in ((0.0, 800.0), (800.0, 0.0)):
        found = compare(figure(metric=metric(value=first)), figure("b", metric=metric(value=second)))
        assert (found.verdict, found.ratio, aspects(found)) == ("refused", None, ["value"])


OF_24 = {"gpus": 40, "nodes": 5, "parallelism": Parallelism(prefill_gpus=16, decode_gpus=24)}
OF_32 = {"parallelism": Parallelism(prefill_gpus=8, decode_gpus=32)}


@pytest.mark.parametrize(("scope", "other", "values"), [
    ("decode_gpu", OF_32, (60.0, 80.0)), ("prefill_gpu", OF_32, (40.0, 20.0)),
    ("decode_node", OF_32, (7.5, 10.0)), ("decode_node", {"nodes": 10}, (7.5, 15.0)),
    ("node", {"nodes": 10}, (12.5, 25.0)),
])  # fmt: skip
def test_of_another_share_of_all_gpus_each_number_is_brought_to_one(scope, other, values):
    """Where 24 of 40 decode, what one of them puts out is 24/40 of it over all."""
    split = OF_24 | {"metric": metric(value=100.0, scope=scope)}
    found = compare(figure(**split), figure("b", **split | other))
    assert (found.verdict, found.a.value, found.b.value) == ("normalised", *map(pytest.approx, values))
    assert compare(figure(**split), figure("b", **split)).verdict == "alike"
    unsaid = figure("c", **split | {"nodes": None, "parallelism": Parallelism()})
    assert aspects(compare(figure(**split), unsaid)) == ["scope"]


@pytest.mark.parametrize(("aspect", "changes"), [
    ("metric", {"metric": metric(name="goodput")}), ("statistic", {"metric": metric(statistic="max")}),
    ("unit", {"metric": metric(unit="req/s")}), ("tokens", {"metric": metric(tokens="unknown")}),
    ("scope", {"metric": metric(scope="unknown")}), ("scope", {"metric": metric(scope="request")}),
    ("scope", {"metric": metric(scope="cluster"), "gpus": None}),
    ("scope", {"metric": metric(scope="decode_node"), "gpus": 40}),
    ("mode", {"mode": "offline"}), ("mode", {"mode": "unknown"}),
    ("input length", {"workload": workload(input_len=1024)}),
    ("output length", {"workload": workload(output_len=1024)}),
    ("output length", {"workload": workload(output_len=None)}),
    ("load", {"workload": workload(concurrency=64)}), ("load", {"workload": workload(request_rate=4.0)}),
    ("load", {"workload": workload(concurrency=None)}),
    ("load", {"workload": workload(ramp_up="linear from 1 to 9 requests a second")}),
    ("dataset", {"workload": workload(dataset="sharegpt")}),
    ("prefix caching", {"workload": workload(prefix_cached=True)}),
    ("precision", {"precision": "ds_fp8_per_token"}), ("model", {"model": "Llama-3-70B"}),
    ("accounting window", {"workload": workload(warmup_s=120.0)}),
])  # fmt: skip
def test_each_unlikeness_refuses_by_its_name(aspect, changes):
    for found in (compare(figure(), figure("b", **changes)), compare(figure("b", **changes), figure())):
        assert found.verdict == "refused" and found.ratio is None
        assert aspect in aspects(found) and not any(line.startswith(aspect) for line in found.uncertain)


def test_every_reason_is_given_and_what_neither_says_is_not_alike():
    other = workload(input_len=512, output_len=512, num_prompts=9)
    found = compare(figure(), figure("b", mode="offline", workload=other))
    assert {"mode", "input length", "output length", "load"} <= set(aspects(found))
    assert aspects(compare(figure(), figure("b", metric=metric(tokens="unknown", scope="unknown")))) == [
        "tokens", "scope"]  # fmt: skip
    at_once = {"workload": workload(concurrency=None, request_rate=0)}
    assert compare(figure(**at_once), figure("b", **at_once)).verdict == "alike"
    open_ = {"workload": workload(output_len=None)}
    assert aspects(compare(figure(**open_), figure("b", **open_))) == ["output length"]
    steady, bursts = (workload(request_rate=4, burstiness=shape) for shape in (1, 0.25))
    assert aspects(compare(figure(workload=steady), figure("b", workload=bursts))) == ["load"]
    assert compare(figure(workload=steady), figure("b", workload=workload(request_rate=4))).verdict == "alike"
    for bound, said in (("about", ()), ("up to", ("a says 'up to': its largest, not its mean",))):
        assert compare(figure(bound=bound), figure("b")).uncertain == said
    off = figure(workload=workload(prefix_cached=None), flags=("--no-enable-prefix-caching",))
    assert compare(off, figure("b")).uncertain == ()
    for what in ({"precision": "", "flags": ()}, {"client": ""}):
        found = compare(figure(**what), figure("b", **what))
        assert found.verdict == "alike" and found.uncertain


TOTAL = metric(tokens="total", value=4000.0)
TTFT = Metric(name="ttft", value=1.5, unit="s", scope="request", statistic="mean")


@pytest.mark.parametrize(("a", "b", "verdict", "first", "ratio"), [
    ({"metric": TOTAL}, {}, "normalised", 800.0, 1.0),  # by the lengths
    ({"metric": TOTAL, "others": (metric(value=777.0),)}, {}, "normalised", 777.0, 777 / 800),  # its own
    ({"metric": TOTAL}, {"metric": TOTAL}, "alike", 4000.0, 1.0),
    ({"metric": TTFT}, {"metric": TTFT.model_copy(update={"value": 750.0, "unit": "ms"})}, "normalised",
     1500.0, 2.0),
    ({"metric": TTFT}, {"metric": TTFT, "gpus": 16}, "alike", 1.5, 1.0),  # a latency is over no GPUs
])  # fmt: skip
def test_numbers_are_brought_to_one_kind(a, b, verdict, first, ratio):
    found = compare(figure(**a), figure("b", **b))
    assert (found.verdict, found.a.value) == (verdict, first)
    assert found.ratio == pytest.approx(ratio)


def test_what_a_result_is_of_has_to_be_known_or_assumed():
    for what in ("hardware", "engine", "version"):
        assert f"b does not say its {what}" in compare(figure(), figure("b", **{what: ""})).uncertain
    for what in ("hardware", "engine", "model"):
        unsaid = figure(**{what: ""})
        assert what in aspects(compare(unsaid, figure("b")))
        assert what in aspects(compare(unsaid, figure("b", **{what: ""})))
        assert [compare(unsaid, figure("b"), [one]).verdict for one in (what, "all")] == ["alike", "alike"]


def test_gpus_are_divided_out_and_named():
    found = compare(figure(), figure("b", gpus=16, nodes=2))
    assert found.verdict == "normalised"
    assert (found.a.value, found.b.value, found.a.scope) == (100.0, 50.0, "gpu")
    assert any(line.startswith("GPUs: 8 against 16") for line in found.confounders)
    assert any("16 a GPU against 8" in line for line in found.uncertain)  # 128 in flight on each


SPLIT = Parallelism(prefill_gpus=16, decode_gpus=24)


@pytest.mark.parametrize("scope, value, gpus, nodes, split, per_gpu", [
    ("gpu", 100.0, None, None, Parallelism(), 100.0),
    ("cluster", 66194.8, 40, 5, SPLIT, 1654.87), ("cluster", 66194.8, None, None, SPLIT, 1654.87),
])  # fmt: skip
def test_per_gpu_is_over_all_gpus_those_of_prefill_too(scope, value, gpus, nodes, split, per_gpu):
    b = figure("b", metric=metric(scope=scope, value=value), gpus=gpus, nodes=nodes, parallelism=split)
    found = compare(figure(gpus=4), b)
    assert found.verdict == "normalised" and found.b.value == pytest.approx(per_gpu)


def test_of_a_range_the_longest_alone_may_be_known():
    longest = {"input_len": None, "output_len": None, "longest_input_len": 1024, "longest_output_len": 1024}
    a, b = (figure(name, workload=workload(**longest)) for name in "ab")
    assert compare(a, b).verdict == "alike"
    other = figure("c", workload=workload(**longest | {"longest_input_len": 8192}))
    assert aspects(compare(a, other)) == ["input length"]
    mean = workload(input_len=1024, output_len=1024)
    for pair in ((a, figure("d", workload=mean)), (figure("d", workload=mean), a)):
        assert aspects(compare(*pair)) == ["input length", "output length"]


def test_what_was_served_counts_not_what_was_asked():
    """A shared-prefix client leaves random_input_len at its default."""
    counted = Totals(completed=500, input_tokens=1600000, output_tokens=400000)
    odd = figure("b", counted=counted, workload=workload(input_len=1024, output_len=1024))
    assert compare(figure(), odd).verdict == "alike"
    trimmed = figure("b", counted=counted, workload=workload(input_len=1024, output_len=1024, warmup_s=60.0))
    assert "input length" in aspects(compare(figure(), trimmed))  # totals of a window are no lengths


def test_confounders_are_listed():
    a = figure(flags=("--tp 8", "--port 2"), environment={"X_Y": "0"})
    b = figure(
        "b", engine="vllm", version="0.11.2", flags=("--enforce-eager", "--port 1"), environment={"X_Y": "1"},
        parallelism=Parallelism(tp=8), model="deepseek-ai/DeepSeek-R1-0528",
    )  # fmt: skip
    text = "\n".join(compare(a, b).confounders)
    for part in ("engine: sglang against vllm", "version", "parallelism", "--enforce-eager", "X_Y 0/1"):
        assert part in text
    assert "weights" in text and "--port" not in text


def test_precision_from_flags():
    run = KNOWN["dstack.online:2"]
    assert quantity_of_run(run, run.metrics[0]).weights == "fp8 block-scale"
    moai = KNOWN["moai-512-512-sharegpt"].model_copy(update={"precision": ""})
    assert quantity_of_run(moai, moai.metrics[0]).weights == "ds_fp8_per_token, fp8_e4m3 cache"
    assert figure(precision="fp8", flags=("--tp 8",)).weights == "fp8 block-scale"
    assert figure(precision="fp8", flags=("--dtype=bfloat16",)).weights == "bfloat16"
    assert compare(figure(precision="fp8"), figure()).uncertain == ("precision: fp8 against fp8 block-scale",)
    assert figure(precision="", flags=("--tp 8",), engine="tensorrt-llm").weights == ""
    flags = ("--enforce-eager", "--tp=8", "decode: --dp 4")
    assert [option(flags, f"--{name}") for name in ("enforce-eager", "tp", "dp", "ep")] == ["1", "8", "4", ""]


@pytest.mark.parametrize(("says", "changes", "tokens", "scope"), [
    ({}, {}, "total", "node"),
    ({}, {"refers_to": ()}, "total", "node"),  # the number finds the row of that GPU and engine
    ({"value": 1262.2}, {}, "output", "node"),
    ({"scope": "gpu"}, {}, "total", "gpu"),  # what it says itself stays
    ({"value": 2200.0}, {"refers_to": ()}, "unknown", "unknown"),  # within its last digit of a dozen rows
    ({}, {"upper": 7000.0, "refers_to": ()}, "unknown", "unknown"),
])  # fmt: skip
def test_a_claims_number_is_what_its_row_says(says, changes, tokens, scope):
    claim = KNOWN["mi350x-cmp-h200-sglang"]
    claim = claim.model_copy(update={"metric": claim.metric.model_copy(update=says), **changes})
    found = sourced(claim, claim.metric, KNOWN, None)
    assert (found.id, found.metric.value) == (claim.id, claim.metric.value)
    assert (found.metric.tokens, found.metric.scope) == (tokens, scope)
    if tokens == "total":  # of two rows that fit neither is taken
        twin = {"twin": KNOWN["dstack.offline:18"].model_copy(update={"id": "twin"})}
        found = sourced(claim.model_copy(update={"refers_to": ()}), claim.metric, KNOWN | twin, None)
        assert found.metric.tokens == "unknown"


def test_which_of_several_numbers_counts():
    """Throughput where both have it; of one kind and scope the first."""
    others = (metric(value=9.0), metric(value=8.0, scope="gpu", tokens="total"))
    run = ServingRun(id="a", client="c", source="a", metrics=(TTFT, OUTPUT, *others))
    less = run.model_copy(update={"metrics": (others[0].model_copy(update={"name": "goodput"}), TTFT)})
    assert [default_metric(run, other) for other in (run, less)] == ["throughput", "ttft"]
    assert by_kind(run) == {"output": 800.0}


def test_names_of_machines_and_engines_and_printed_numbers():
    assert same_hardware("8x AMD Instinct MI300X", "mi300") and not same_hardware("MI300X", "MI350X")
    assert not same_hardware("H200", "H100") and not same_hardware("", "H200")
    assert same_engine("TensorRT-LLM", "trt-llm")
    assert not same_engine("vllm", "sglang") and not same_engine("", "vllm")
    assert prints(2656, 2655.89) and prints(83.82, 83.822)
    assert not prints(2656, 2658) and not prints(17000, 16964.2)
