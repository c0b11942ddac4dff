"""Each rule finds what breaks it, says the numbers, and is silent on a run that holds."""

from __future__ import annotations

import numpy as np
import pytest

from harness.serving.integrity import examined
from harness.serving.schema import Metric, OfferedLoad, Parallelism, RequestSamples, ServingRun, Totals

REQUESTS, DURATION_S, OUTPUT = 100, 50.0, 32


def good_run(lengths: np.ndarray | None = None, places: int = 12, **changes: object) -> ServingRun:
    """A run made of single requests: 8 at a time, none idle."""
    draw = np.random.default_rng(8)
    lengths = np.full(REQUESTS, OUTPUT) if lengths is None else lengths
    ttft = draw.uniform(200, 700, REQUESTS)
    itls = [draw.gamma(4, 25, n - 1) for n in lengths]
    e2e = ttft + [one.sum() for one in itls]
    tpot = np.array([one.mean() for one in itls])
    duration = e2e.sum() / 1e3 / 7.9
    metrics = []
    for name, values in (("ttft", ttft), ("e2e", e2e), ("tpot", tpot), ("itl", np.concatenate(itls))):
        known = {
            "mean": values.mean(), "std": values.std(), "median": np.median(values),
            **{f"p{q}": np.percentile(values, q) for q in (90, 99)},
        }  # fmt: skip
        metrics += [_metric(name, round(v, places), "ms", "request", s) for s, v in known.items()]
    output, inputs = int(lengths.sum()), REQUESTS * 128
    for tokens, count in (("output", output), ("input", inputs), ("total", output + inputs)):
        metrics.append(_metric("throughput", round(count / duration, places), "tok/s", tokens=tokens))
    metrics.append(_metric("request_throughput", round(REQUESTS / duration, places), "req/s"))
    metrics.append(_metric("concurrency", round(7.9, places), "1", statistic="mean"))
    run = ServingRun(
        id="made",
        client="test",
        source="made",
        gpus=8,
        mode="online",
        workload=OfferedLoad(
            input_len=128, output_len=float(OUTPUT), concurrency=8, request_rate=0.0, num_prompts=REQUESTS
        ),
        totals=Totals(
            duration_s=round(duration, places),
            completed=REQUESTS,
            failed=0,
            input_tokens=inputs,
            output_tokens=output,
        ),
        metrics=tuple(metrics),
        samples=RequestSamples(
            input_lens=(128,) * REQUESTS,
            output_lens=tuple(map(int, lengths)),
            ttfts_ms=tuple(ttft),
            e2es_ms=tuple(e2e),
            itls_ms=tuple(map(tuple, itls)),
        ),
    )
    return run.model_copy(update=changes)


def _metric(name, value, unit, scope="instance", statistic="total", tokens="none"):
    return Metric(name=name, value=float(value), unit=unit, scope=scope, statistic=statistic, tokens=tokens)


def with_metric(run: ServingRun, name: str, statistic: str, factor: float, tokens: str = "") -> ServingRun:
    wanted = run.metric(name, statistic, tokens)
    changed = wanted.model_copy(update={"value": wanted.value * factor})
    return run.model_copy(update={"metrics": tuple(changed if m is wanted else m for m in run.metrics)})


def without_samples(run: ServingRun) -> ServingRun:
    return run.model_copy(update={"samples": RequestSamples()})


def rules(run: ServingRun) -> dict[str, str]:
    return {one.rule: one.severity for one in examined(run).findings}


@pytest.mark.parametrize("places", [12, 2, 1])
def test_a_run_that_holds_has_no_finding(places):
    """As a program writes it, and as a console rounds it."""
    lengths = np.random.default_rng(1).integers(4, 60, REQUESTS)
    assert rules(good_run(places=places)) == {}
    for run in (good_run(lengths, places), without_samples(good_run(lengths, places))):
        assert {r for r, severity in rules(run).items() if severity != "note"} == set()


@pytest.mark.parametrize(
    ("name", "statistic", "tokens", "factor", "rule", "severity", "says"),
    [
        ("throughput", "total", "output", 1 / 8, "throughput", "wrong", "the number of GPUs"),
        ("throughput", "total", "input", 1e3, "throughput", "wrong", "a thousand"),
        ("throughput", "total", "output", 160 / 32, "throughput", "wrong", "it is that of total tokens"),
        ("throughput", "total", "total", 1.05, "total_throughput", "wrong", "make"),
        ("request_throughput", "total", "", 1.05, "request_throughput", "wrong", "completed"),
        ("concurrency", "mean", "", 0.9, "littles_law", "wrong", "= 7.9 in flight"),
        ("concurrency", "mean", "", 1.1, "concurrency_limit", "wrong", "limit of 8"),
        ("tpot", "mean", "", 1.02, "e2e_identity", "wrong", "mean tpot"),
        ("tpot", "mean", "", 1e-3, "e2e_identity", "wrong", "tpot is off by a thousand"),
        ("ttft", "mean", "", 1e-3, "e2e_identity", "wrong", "ttft is off by a thousand"),
        ("e2e", "mean", "", 1e-3, "e2e_identity", "wrong", "e2e is off by a thousand"),
        ("ttft", "p99", "", 0.5, "percentile_order", "wrong", "wrong way round"),
        ("ttft", "median", "", 1e-3, "moments", "wrong", "impossible"),
        ("ttft", "p99", "", 1e3, "moments", "wrong", "impossible"),
        ("tpot", "p99", "", 3.0, "parts_of_e2e", "wrong", "longer than e2e p99"),
        ("itl", "mean", "", 1e3, "itl_beside_tpot", "suspect", "other units"),
        ("ttft", "std", "", 1e3, "moments", "suspect", "std"),
        ("e2e", "p90", "", 1e3, "longer_than_run", "wrong", "longer than the run"),
    ],
)
def test_a_number_that_cannot_be(name, statistic, tokens, factor, rule, severity, says):
    run = with_metric(without_samples(good_run()), name, statistic, factor, tokens)
    found = [one for one in examined(run).findings if one.rule == rule]
    assert found, rules(run)
    assert severity in {one.severity for one in found}
    assert any(says in one.message for one in found), [one.message for one in found]
    assert found[0].numbers


def test_equal_lengths_are_held_more_tightly_than_others():
    """With lengths that differ, the mean of TPOT need not weigh tokens equally."""
    lengths = np.random.default_rng(1).integers(4, 60, REQUESTS)
    run = with_metric(without_samples(good_run(lengths)), "tpot", "mean", 1.02)
    assert "e2e_identity" not in rules(run)
    assert rules(with_metric(run, "tpot", "mean", 3.0))["e2e_identity"] == "suspect"


def test_all_latencies_in_seconds():
    run = without_samples(good_run())
    scaled = [m.model_copy(update={"value": m.value / 1e3}) if m.unit == "ms" else m for m in run.metrics]
    run = run.model_copy(update={"metrics": tuple(m for m in scaled if m.name != "concurrency")})
    assert rules(run)["concurrency_floor"] == "suspect"
    slow = run.model_copy(update={"workload": OfferedLoad(request_rate=0.1)})
    assert "concurrency_floor" not in rules(slow)


def test_a_trimmed_window_is_a_note_with_its_reason():
    run = without_samples(good_run())
    run = with_metric(with_metric(run, "tpot", "mean", 1.1), "throughput", "total", 1.2, "output")
    window = run.workload.model_copy(update={"warmup_s": 30.0, "cooldown_s": 20.0})
    found = examined(run.model_copy(update={"workload": window})).findings
    equations = [one for one in found if one.rule in ("e2e_identity", "throughput", "concurrency_limit")]
    assert {one.rule for one in equations} >= {"e2e_identity", "throughput"}
    assert {one.severity for one in equations} == {"note"}
    assert all("30 s of warm-up and 20 s of cool-down" in one.message for one in equations)


@pytest.mark.parametrize(
    ("totals", "rule", "severity"),
    [
        ({"completed": 99}, "completed", "suspect"),
        ({"completed": 101}, "completed", "wrong"),
        ({"completed": 0}, "completed", "wrong"),
        ({"completed": 98, "failed": 2}, "failed", "suspect"),
        ({"duration_s": 0.0}, "zero", "suspect"),
        ({"output_tokens": 3200 * 3}, "output_length", "suspect"),
        ({"output_tokens": 1600}, "output_length", "note"),
        ({"input_tokens": 12800000}, "input_length", "suspect"),
        ({"duration_s": None}, "unsaid", "note"),
    ],
)
def test_counts(totals, rule, severity):
    run = without_samples(good_run())
    run = run.model_copy(update={"totals": run.totals.model_copy(update=totals)})
    assert rules(run).get(rule) == severity


def test_itl_of_a_stream_interval_is_a_note():
    run = without_samples(good_run())
    for statistic in ("mean", "median", "std", "p90", "p99"):
        run = with_metric(run, "itl", statistic, 10.0)
    found = next(one for one in examined(run).findings if one.rule == "itl_beside_tpot")
    assert found.severity == "note"
    assert "about 10 tokens a chunk" in found.message or "about 9." in found.message


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ({"ttfts_ms": (300.0,) * REQUESTS}, "ttft"),
        ({"ttfts_ms": (300.0,) * (REQUESTS - 1)}, "differ in length"),
        ({"output_lens": (OUTPUT,) * (REQUESTS - 1) + (OUTPUT - 1,)}, "output_lens add up to 3199"),
        ({"itls_ms": ((1000.0,) * 31,) * REQUESTS}, "itl mean"),
    ],
)
def test_samples(samples, says):
    run = good_run()
    run = run.model_copy(update={"samples": run.samples.model_copy(update=samples)})
    found = [one for one in examined(run).findings if one.rule == "samples"]
    assert any(says in one.message and one.severity == "wrong" for one in found), found


def plus(run: ServingRun, **values: float) -> ServingRun:
    """With further metrics: `name_statistic`."""
    more = []
    for key, value in values.items():
        name, _, statistic = key.rpartition("_")
        unit = {"goodput": "req/s", "max_output_tokens_per_s": "tok/s"}.get(name, "1")
        more.append(_metric(name, value, unit, statistic=statistic))
    return run.model_copy(update={"metrics": (*run.metrics, *more)})


@pytest.mark.parametrize(
    ("changed", "rule", "severity", "says"),
    [
        (lambda run: plus(run, goodput_total=99.0), "goodput", "wrong", "above the request throughput"),
        (lambda run: plus(run, max_concurrent_requests_max=5.0), "peak", "wrong", "7.9 in flight on average"),
        (lambda run: plus(run, max_output_tokens_per_s_max=9.0), "peak", "suspect", "below the mean of"),
        (
            lambda run: plus(run, tokens_per_user_mean=9.0, tokens_per_user_max=8.0),
            "percentile_order",
            "wrong",
            "mean 9 and max 8 are the wrong way round",
        ),
        (lambda run: with_metric(run, "tpot", "mean", 2.0), "moments", "suspect", "is above the p99 of"),
        (
            lambda run: run.model_copy(
                update={
                    "samples": run.samples.model_copy(update={"ttfts_ms": (9e3, *run.samples.ttfts_ms[1:])})
                }
            ),
            "samples",
            "suspect",
            "1 of 100 requests do not take what their tokens take: request 0",
        ),
    ],
    ids=["goodput", "in flight", "tokens a second", "mean above max", "mean above p99", "parts of a request"],
)
def test_what_a_files_own_numbers_reveal(changed, rule, severity, says):
    found = [one for one in examined(changed(good_run())).findings if one.rule == rule]
    assert any(says in one.message and one.severity == severity for one in found), found
    sound = plus(
        good_run(), goodput_total=0.5, max_concurrent_requests_max=9.0, max_output_tokens_per_s_max=90.0
    )
    assert not [one for one in examined(sound).findings if one.severity != "note"]


def asked(**changes: float):
    return lambda run: run.model_copy(update={"workload": run.workload.model_copy(update=changes)})


def listed(**changes: object):
    return lambda run: run.model_copy(update={"samples": run.samples.model_copy(update=changes)})


def also(name: str, value: float, unit: str, statistic: str, scope: str = "request"):
    metric = _metric(name, value, unit, scope, statistic)
    return lambda run: run.model_copy(update={"metrics": (*run.metrics, metric)})


GOOD = good_run()


@pytest.mark.parametrize(
    ("changed", "rule", "severity", "says"),
    [
        (asked(concurrency=32), "concurrency_not_reached", "suspect", "the client allows 32"),
        (asked(request_rate=0.5), "rate_not_sent", "suspect", "though a rate of 0.5 was asked for"),
        (asked(range_ratio=8.0), "plausible", "wrong", "range_ratio is 8"),
        (also("ttft", 5e3, "ms", "max"), "moments", "wrong", "max 5000 is impossible with mean"),
        (also("accept_length", 0.5, "1", "mean", "instance"), "plausible", "wrong", "accept_length is 0.5"),
        (
            lambda run: also("accept_length", 2.5, "1", "mean", "instance")(
                run.model_copy(update={"flags": ("--dtype=auto",)})
            ),
            "accept_length",
            "suspect",
            "name no speculation",
        ),
        (
            lambda run: run.model_copy(update={"parallelism": Parallelism(tp=8, ep=64)}),
            "plausible",
            "wrong",
            "ep is 64, which cannot be over 8 GPUs",
        ),
        (lambda run: with_metric(run, "ttft", "std", 1.1), "samples", "wrong", "ttft std"),
        (also("ttft", 300.0, "ms", "p5"), "samples", "wrong", "ttft p5 is 300 ms"),
        (
            lambda run: run.model_copy(update={"parallelism": Parallelism(tp=5)}),
            "plausible",
            "wrong",
            "tp is 5, which cannot be of 8 GPUs, which are no multiple of it",
        ),
        (asked(output_len=29.0, range_ratio=0.9), "output_length", "suspect", "32 counted"),
        (lambda run: with_metric(run, "tpot", "median", 1.05), "samples", "wrong", "tpot median"),
        (listed(itls_ms=((),) * REQUESTS), "samples", "wrong", "the lists of itls are empty"),
        (
            listed(ttfts_ms=GOOD.samples.ttfts_ms[::-1]),
            "samples",
            "suspect",
            "e2es and ttfts and itls do not belong together",
        ),
        (
            listed(itls_ms=(GOOD.samples.itls_ms[0][:9], *GOOD.samples.itls_ms[1:])),
            "samples",
            "suspect",
            "they are 32 and 10 of request 0",
        ),
        (
            listed(ttfts_ms=(GOOD.samples.ttfts_ms[0] + 30, *GOOD.samples.ttfts_ms[1:])),
            "samples",
            "suspect",
            "of request 0, though they agree over all or in most",
        ),
        (also("throughput_per_user", 20.0, "tok/s", "mean"), "throughput_per_user", "suspect", "is 20 tok/s"),
    ],
)
def test_what_follows_from_other_numbers(changed, rule, severity, says):
    assert [one for one in examined(GOOD).findings if one.severity != "note"] == []
    found = [one for one in examined(changed(GOOD)).findings if one.severity != "note"]
    of_rule = [one for one in found if one.rule == rule]
    assert any(says in one.message and one.severity == severity for one in of_rule), found


def test_a_client_at_its_end_or_with_failures_has_fewer_in_flight():
    """Eight requests of which one takes ten times as long: that one is alone most of the time."""
    metrics = (_metric("e2e", 2125.0, "ms", "request", "mean"), _metric("e2e", 1e4, "ms", "request", "max"))
    load = OfferedLoad(concurrency=8, request_rate=0.0, num_prompts=8)
    run = ServingRun(id="x", client="c", source="x", workload=load, metrics=metrics,
                     totals=Totals(duration_s=10.0, completed=8))  # fmt: skip
    assert "concurrency_not_reached" not in rules(run)
    wide = run.model_copy(update={"totals": Totals(duration_s=1e3, completed=8)})
    assert rules(wide)["concurrency_not_reached"] == "suspect"
    failed = wide.model_copy(update={"totals": Totals(duration_s=1e3, completed=8, failed=400)})
    assert "concurrency_not_reached" not in rules(failed)


def test_a_deviation_wider_than_both_ends():
    metrics = [_metric("e2e", v, "ms", "request", s) for s, v in
               (("mean", 1000.0), ("min", 900.0), ("max", 1100.0), ("std", 150.0))]  # fmt: skip
    run = ServingRun(id="x", client="c", source="x", metrics=tuple(metrics), totals=Totals(completed=100))
    assert rules(run)["moments"] == "wrong"
    narrow = run.model_copy(update={"metrics": (*metrics[:3], _metric("e2e", 99.0, "ms", "request", "std"))})
    assert "moments" not in rules(narrow)


def test_lengths_of_a_known_range_are_held_more_tightly():
    lengths = np.random.default_rng(1).integers(24, 32, REQUESTS, endpoint=True)
    run = with_metric(without_samples(good_run(lengths)), "tpot", "mean", 1.1)
    run = asked(output_len=28.0)(run)
    assert "e2e_identity" not in rules(run)
    assert rules(asked(output_len=28.0, range_ratio=0.75)(run))["e2e_identity"] == "suspect"


def test_a_median_in_the_place_of_the_deviation():
    run = without_samples(good_run())
    known = {s: run.value("tpot", s) for s in ("median", "std")}
    run = with_metric(run, "tpot", "std", known["median"] / known["std"])
    run = with_metric(run, "tpot", "median", known["std"] / known["median"])
    assert any("tpot: std" in one.message for one in examined(run).findings if one.rule == "moments")


def test_fewer_samples_than_requests():
    run = good_run()
    cut = {name: values[:-1] for name, values in run.samples.model_dump().items()}
    run = run.model_copy(update={"samples": RequestSamples(**cut)})
    assert rules(run)["samples"] == "wrong"


def test_throughput_of_a_gpu_is_held_against_all_of_them():
    run = with_metric(without_samples(good_run()), "throughput", "total", 1 / 8, "output")
    scoped = [
        m.model_copy(update={"scope": "gpu"}) if (m.name, m.tokens) == ("throughput", "output") else m
        for m in run.metrics
    ]
    assert rules(run.model_copy(update={"metrics": tuple(scoped)})) == {}


@pytest.mark.parametrize(
    ("name", "unit", "statistic", "value"),
    [("tpot", "ms", "mean", 0.05), ("prefill", "ms", "mean", 1e8), ("throughput", "tok/s", "total", 1e9)],
)
def test_values_that_no_engine_reaches(name, unit, statistic, value):
    run = ServingRun(
        id="x", client="c", source="x", metrics=(_metric(name, value, unit, statistic=statistic),)
    )
    assert rules(run)["plausible"] == "suspect"
    zero = run.model_copy(update={"metrics": (_metric(name, 5.0, unit, statistic=statistic),)})
    assert "plausible" not in rules(zero)


def test_a_statistic_that_one_latency_lacks():
    run = without_samples(good_run())
    kept = tuple(m for m in run.metrics if (m.name, m.statistic) != ("tpot", "p99"))
    found = [
        one for one in examined(run.model_copy(update={"metrics": kept})).findings if one.rule == "incomplete"
    ]
    assert [one.message.split(",")[0] for one in found] == ["tpot has no p99"]
    assert found[0].severity == "note"


def test_text_that_does_not_tokenise_back_is_a_note():
    assert rules(good_run(extra={"total_output_tokens_retokenized": 32000})) == {"retokenised": "note"}
    assert rules(good_run(extra={"total_output_tokens_retokenized": 3100})) == {}


def test_a_client_that_divides_by_another_time_than_it_states_is_noted():
    good = without_samples(good_run())
    rates = [one for one in good.metrics if one.name in ("throughput", "request_throughput")]
    assert len(rates) > 2
    scaled = [
        one.model_copy(update={"value": one.value * (0.99 if one in rates else 1)}) for one in good.metrics
    ]
    assert rules(good.model_copy(update={"metrics": tuple(scaled)})) == {"clock": "note"}


def test_a_client_has_one_clock():
    run = with_metric(without_samples(good_run()), "request_throughput", "total", 0.99)
    assert rules(run)["request_throughput"] == "suspect"


def test_time_after_the_last_token_is_a_note():
    """guidellm's request ends with its response."""
    run = without_samples(good_run())
    for statistic in ("mean", "median", "p90", "p99"):
        run = with_metric(run, "e2e", statistic, 1.02)
    run = run.model_copy(update={"metrics": tuple(m for m in run.metrics if m.name != "concurrency")})
    run = run.model_copy(update={"workload": run.workload.model_copy(update={"concurrency": 9})})
    assert rules(run) == {"e2e_identity": "note"}


def test_a_length_asked_for_is_no_length_counted():
    """Requests stop early, or their lengths are of a range: E2E may be less than what follows from it."""
    run = without_samples(good_run(np.full(REQUESTS, 20)))
    run = run.model_copy(update={"totals": Totals()})
    assert "e2e_identity" not in rules(run)
    assert rules(with_metric(run, "e2e", "mean", 1e-3))["e2e_identity"] == "suspect"


def test_quantiles_of_samples_may_take_either_neighbour():
    run = good_run()
    ttfts = sorted(run.samples.ttfts_ms)
    wanted = run.metric("ttft", "p90")
    for value, holds in ((ttfts[89], True), (ttfts[90], True), (ttfts[85], False), (ttfts[95], False)):
        other = tuple(m.model_copy(update={"value": value}) if m is wanted else m for m in run.metrics)
        assert ("samples" not in rules(run.model_copy(update={"metrics": other}))) is holds


def batch_run(**changes: float) -> ServingRun:
    """What SGLang's bench_one_batch_server writes: 16 prompts of 1024 in, 64 out, 1.9 s."""
    values = {
        "prefill": 16 * 1024 / 0.8,
        "decode": 16 * 64 / 1.1,
        "total": 16 * 1088 / 1.9,
        "last": 918.0,
    } | changes
    return ServingRun(
        id="b",
        client="sglang.bench_one_batch_server",
        source="b",
        workload=OfferedLoad(input_len=1024, output_len=64, num_prompts=16, concurrency=16, request_rate=0.0),
        totals=Totals(duration_s=1.9),
        metrics=(
            _metric("prefill_throughput", values["prefill"], "tok/s", tokens="input"),
            _metric("decode_throughput", values["decode"], "tok/s", tokens="output"),
            _metric("last_gen_throughput", values["last"], "tok/s", tokens="output"),
            _metric("throughput", values["total"], "tok/s", tokens="total"),
            _metric("ttft", 800.0, "ms", "request", "max"),
        ),
    )


@pytest.mark.parametrize(
    ("change", "rule", "severity"),
    [
        ({"prefill": 1e5}, "prefill_throughput", "wrong"),
        ({"decode": 500.0}, "decode_throughput", "wrong"),
        ({"total": 500.0}, "throughput", "suspect"),
    ],
)
def test_a_batch_in_lockstep(change, rule, severity):
    assert {r for r, found in rules(batch_run()).items() if found != "note"} == set()
    assert rules(batch_run(**change))[rule] == severity


@pytest.mark.parametrize("value, found", [(241.76, ["throughput"]), (120.9, [])])
def test_a_throughput_of_unsaid_tokens_is_of_one_of_the_counts(value, found):
    metric = Metric(name="throughput", value=value, unit="tok/s", scope="node", tokens="unknown")
    totals = Totals(duration_s=16.94, output_tokens=2048)
    run = ServingRun(id="made", client="test", source="made", nodes=1, totals=totals, metrics=(metric,))
    assert [one.rule for one in examined(run).findings if one.severity != "note"] == found
