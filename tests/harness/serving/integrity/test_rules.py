"""Each rule finds what breaks it, says the numbers, and is silent on a run that holds."""

import functools
from pathlib import Path

import numpy as np
import pytest

from harness.files import read_toml
from harness.serving.integrity import common, examined
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
    load = OfferedLoad(
        input_len=128, output_len=float(OUTPUT), concurrency=8, request_rate=0.0, num_prompts=REQUESTS
    )
    run = ServingRun(
        id="made", client="test", source="made", gpus=8, mode="online", workload=load, metrics=tuple(metrics),
        totals=Totals(duration_s=round(duration, places), completed=REQUESTS, failed=0, input_tokens=inputs,
                      output_tokens=output),
        samples=RequestSamples(
            input_lens=(128,) * REQUESTS, output_lens=tuple(map(int, lengths)), ttfts_ms=tuple(ttft),
            e2es_ms=tuple(e2e), itls_ms=tuple(map(tuple, itls)),
        ),
    )  # fmt: skip
    return run.model_copy(update=changes)


def _metric(name, value, unit, scope="instance", statistic="total", tokens="none"):
    return Metric(name=name, value=float(value), unit=unit, scope=scope, statistic=statistic, tokens=tokens)


def rules(run: ServingRun) -> dict[str, str]:
    return {one.rule: one.severity for one in examined(run).findings}


# Changes of a run, each a function of it


def times(factor: float, name: str, *statistics: str, tokens: str = ""):
    """One metric, or some statistics of it, times a factor."""

    def change(run):
        wanted = [run.metric(name, statistic, tokens) for statistic in statistics or ("total",)]
        return with_metrics(
            run, [m.model_copy(update={"value": m.value * factor}) if m in wanted else m for m in run.metrics]
        )

    return change


def with_metrics(run: ServingRun, metrics) -> ServingRun:
    return run.model_copy(update={"metrics": tuple(metrics)})


def also(name: str, value: float, unit: str, statistic: str = "total", scope: str = "instance"):
    metric = _metric(name, value, unit, scope, statistic)
    return lambda run: with_metrics(run, (*run.metrics, metric))


def without(name: str, statistic: str):
    return lambda run: with_metrics(
        run, (m for m in run.metrics if (m.name, m.statistic) != (name, statistic))
    )


def of(part: str, **changes: object):
    return lambda run: run.model_copy(update={part: getattr(run, part).model_copy(update=changes)})


def said(**changes: object):
    return lambda run: run.model_copy(update=changes)


def each(*changes):
    return lambda run: functools.reduce(lambda changed, change: change(changed), changes, run)


GOOD, UNSAMPLED = good_run(), good_run(samples=RequestSamples())
LENGTHS = np.random.default_rng(1).integers(4, 60, REQUESTS)
UNLIKE = good_run(LENGTHS, samples=RequestSamples())
RANGE = good_run(np.random.default_rng(1).integers(24, 32, REQUESTS, endpoint=True), samples=RequestSamples())
EARLY = good_run(np.full(REQUESTS, 20), samples=RequestSamples())
SHORT = EARLY.model_copy(update={"totals": Totals()})
TTFTS, ITLS, E2ES = GOOD.samples.ttfts_ms, GOOD.samples.itls_ms, GOOD.samples.e2es_ms
MEDIAN, STD = (GOOD.value("tpot", statistic) for statistic in ("median", "std"))
LATE = each(times(1.02, "e2e", "mean", "median", "p90", "p99"), without("concurrency", "mean"),
            of("workload", concurrency=9))  # fmt: skip


@pytest.mark.parametrize("places", [12, 2, 1])
def test_a_run_that_holds_has_no_finding(places):
    """As a program writes it, and as a console rounds it."""
    assert rules(good_run(places=places)) == {}
    for samples in ({}, {"samples": RequestSamples()}):
        assert set(rules(good_run(LENGTHS, places, **samples)).values()) <= {"note"}


@pytest.mark.parametrize(("change", "rule", "severity", "says"), [
    (times(1 / 8, "throughput", tokens="output"), "throughput", "wrong", "the number of GPUs"),
    (times(1e3, "throughput", tokens="input"), "throughput", "wrong", "a thousand"),
    (times(160 / 32, "throughput", tokens="output"), "throughput", "wrong", "it is that of total tokens"),
    (times(1.05, "throughput", tokens="total"), "total_throughput", "wrong", "make"),
    (times(1.05, "request_throughput"), "request_throughput", "wrong", "completed"),
    (times(0.99, "request_throughput"), "request_throughput", "suspect", ""),  # a client has one clock
    (times(0.9, "concurrency", "mean"), "littles_law", "wrong", "= 7.9 in flight"),
    (times(1.1, "concurrency", "mean"), "concurrency_limit", "wrong", "limit of 8"),
    (times(1.02, "tpot", "mean"), "e2e_identity", "wrong", "mean tpot"),
    *[(times(1e-3, name, "mean"), "e2e_identity", "wrong", f"{name} is off by a thousand")
      for name in ("tpot", "ttft", "e2e")],
    (times(0.5, "ttft", "p99"), "percentile_order", "wrong", "wrong way round"),
    (times(1e-3, "ttft", "median"), "moments", "wrong", "impossible"),
    (times(1e3, "ttft", "p99"), "moments", "wrong", "impossible"),
    (times(50.0, "ttft", "std"), "moments", "suspect", "of 100 requests"),
    (times(2.0, "tpot", "mean"), "moments", "suspect", "is above the p99 of"),
    (each(times(MEDIAN / STD, "tpot", "std"), times(STD / MEDIAN, "tpot", "median")), "few_requests", None,
     "x the median of"),
    (also("ttft", 5e3, "ms", "max", "request"), "moments", "wrong", "max 5000 is impossible with mean"),
    (times(3.0, "tpot", "p99"), "parts_of_e2e", "wrong", "longer than e2e p99"),
    (times(1e3, "itl", "mean"), "itl_beside_tpot", "suspect", "other units"),
    (times(10.0, "itl", "mean", "median", "std", "p90", "p99"), "itl_beside_tpot", "note", "tokens a chunk"),
    (times(1e3, "e2e", "p90"), "longer_than_run", "wrong", "longer than the run"),
    (of("totals", completed=99), "completed", "suspect", ""),
    *[(of("totals", completed=count), "completed", "wrong", "") for count in (0, 101)],
    (of("totals", completed=98, failed=2), "failed", "suspect", ""),
    (of("totals", duration_s=0.0), "zero", "suspect", ""),
    (of("totals", output_tokens=3200 * 3), "output_length", "suspect", ""),
    (of("totals", output_tokens=1600), "output_length", "note", ""),
    (of("workload", output_len=29.3, range_ratio=0.5), "output_length", "suspect", "32 counted"),
    (of("totals", input_tokens=12800000), "input_length", "suspect", ""),
    (of("workload", concurrency=32), "concurrency_not_reached", "suspect", "the client allows 32"),
    (of("workload", request_rate=0.5), "rate_not_sent", "suspect", "though a rate of 0.5 was asked for"),
    (of("workload", range_ratio=8.0), "plausible", "wrong", "range_ratio is 8"),
    (said(parallelism=Parallelism(tp=8, ep=64)), "plausible", "wrong", "ep is 64, which cannot be over 8"),
    (said(parallelism=Parallelism(tp=5)), "plausible", "wrong", "tp is 5, which cannot be of 8 GPUs"),
    (also("accept_length", 0.5, "1", "mean"), "plausible", "wrong", "accept_length is 0.5"),
    (each(said(flags=("--dtype=auto",)), also("accept_length", 2.5, "1", "mean")), "accept_length", "suspect",
     "name no speculation"),
    (also("goodput", 99.0, "req/s"), "goodput", "wrong", "above the request throughput"),
    (also("max_concurrent_requests", 5.0, "1", "max"), "peak", "wrong", "= 7.9 on average"),
    (also("max_output_tokens_per_s", 9.0, "tok/s", "max"), "peak", "suspect", "fewer than the mean of"),
    (each(also("tokens_per_user", 9.0, "1", "mean"), also("tokens_per_user", 8.0, "1", "max")),
     "percentile_order", "wrong", "mean 9 and max 8 are the wrong way round"),
    (also("throughput_per_user", 20.0, "tok/s", "mean", "request"), "throughput_per_user", "suspect",
     "is 20 tok/s"),
    (said(extra={"total_output_tokens_retokenized": 32000}), "retokenised", "note", ""),
    (LATE, "e2e_identity", "note", ""),  # guidellm's request ends with its response
])  # fmt: skip
def test_what_cannot_be_is_found_with_its_numbers(change, rule, severity, says):
    found = [one for one in examined(change(UNSAMPLED)).findings if one.rule == rule]
    assert found, rules(change(UNSAMPLED))
    assert severity is None or severity in {one.severity for one in found}
    assert any(says in one.message for one in found), [one.message for one in found]


@pytest.mark.parametrize(("change", "severity", "says"), [
    (of("samples", ttfts_ms=(300.0,) * REQUESTS), "wrong", "ttft"),
    *[(of("samples", **{name: getattr(GOOD.samples, name)[:-1]}), "wrong", "differ in length")
      for name in ("ttfts_ms", "itls_ms", "e2es_ms", "output_lens")],
    (of("samples", output_lens=(*GOOD.samples.output_lens[1:], OUTPUT - 1)), "wrong", "add up to 3199"),
    (of("samples", itls_ms=((1000.0,) * 31,) * REQUESTS), "wrong", "itl mean"),
    (of("samples", itls_ms=((),) * REQUESTS), "wrong", "the lists of itls are empty"),
    (said(samples=RequestSamples(**{k: v[:-1] for k, v in GOOD.samples.model_dump().items()})), "wrong", ""),
    (times(1.1, "ttft", "std"), "wrong", "ttft std"),
    (times(1.05, "tpot", "median"), "wrong", "tpot median"),
    (also("ttft", 300.0, "ms", "p5", "request"), "wrong", "ttft p5 is 300 ms"),
    (of("samples", ttfts_ms=(9e3, *TTFTS[1:])), "suspect",
     "1 of 100 requests is not that of their tokens: request 0"),
    (of("samples", ttfts_ms=TTFTS[::-1]), "suspect", "e2es and ttfts and itls do not belong together"),
    (lambda _: of("samples", output_lens=tuple(map(int, LENGTHS[::-1])))(good_run(LENGTHS)), "suspect",
     "output_lens and itls and the first token do not belong together"),
    (of("samples", itls_ms=(ITLS[0][:9], *ITLS[1:])), "suspect", "they are 32 and 10 of request 0"),
    (of("samples", ttfts_ms=(TTFTS[0] + 30, *TTFTS[1:])), "suspect", "though their sums agree, or most"),
])  # fmt: skip
def test_samples_are_held_against_what_is_said_of_them(change, severity, says):
    found = [one for one in examined(change(GOOD)).findings if one.rule == "samples"]
    assert any(says in one.message and one.severity == severity for one in found), found


SECONDS = each(*(times(1e-3, name, "mean", "std", "median", "p90", "p99")
                 for name in ("ttft", "e2e", "tpot", "itl")), without("concurrency", "mean"))  # fmt: skip


@pytest.mark.parametrize(("run", "change", "rule", "severity"), [
    # With lengths that differ, the mean of TPOT need not weigh tokens equally; of a known range, nearly.
    (UNLIKE, times(1.02, "tpot", "mean"), "e2e_identity", None),
    (UNLIKE, times(3.0, "tpot", "mean"), "e2e_identity", "suspect"),
    (RANGE, each(times(1.1, "tpot", "mean"), of("workload", output_len=28.0)), "e2e_identity", None),
    (RANGE, each(times(1.1, "tpot", "mean"), of("workload", output_len=28.0, range_ratio=0.75)),
     "e2e_identity", "suspect"),
    # A length asked for is no length counted: requests stop early.
    (SHORT, said(), "e2e_identity", None), (EARLY, said(), "e2e_identity", None),
    (SHORT, times(1e-3, "e2e", "mean"), "e2e_identity", "suspect"),
    (UNSAMPLED, SECONDS, "concurrency_floor", "suspect"),
    (UNSAMPLED, each(SECONDS, said(workload=OfferedLoad(request_rate=0.1))), "concurrency_floor", None),
    (UNSAMPLED, each(SECONDS, said(workload=OfferedLoad(request_rate=0))), "concurrency_floor", "suspect"),
    (UNSAMPLED, each(SECONDS, said(workload=OfferedLoad())), "concurrency_floor", None),
    (UNSAMPLED, said(extra={"total_output_tokens_retokenized": 3100}), "retokenised", None),
    (UNSAMPLED, of("totals", completed=98, failed=2), "completed", None),
    (UNSAMPLED, of("workload", output_len=30.5, range_ratio=0.5), "output_length", None),  # by chance
    (UNSAMPLED, also("goodput", 0.5, "req/s"), "goodput", None),
    (UNSAMPLED, times(1.5, "tpot", "std"), "parts_of_e2e", None),  # deviations do not add up
    (UNLIKE, each(without("e2e", "mean"), also("max_concurrent_requests", 7.0, "1", "max")), "peak", None),
    *[(UNSAMPLED, also("max_concurrent_requests", most, "1", "max"), "peak", None) for most in (7.9, 9.0)],
    (UNSAMPLED, also("max_output_tokens_per_s", 90.0, "tok/s", "max"), "peak", None),
    # Pieces of a stream that are more than a token say nothing of tokens a second.
    (UNSAMPLED, each(also("max_output_tokens_per_s", 9.0, "tok/s", "max"), times(2.0, "itl", "mean")), "peak",
     None),
    (GOOD, times(1.0, "ttft", "p90"), "samples", None),
    # Half of the streams have pieces of two tokens: they are no list in another order.
    (GOOD, each(lambda run: with_metrics(run, [m for m in run.metrics if m.name != "itl"]),
                of("samples", itls_ms=(*((a + b, *c) for a, b, *c in ITLS[:50]), *ITLS[50:]))),
     "samples", None),
    # Half of the requests end after their last token.
    (GOOD, of("samples", e2es_ms=(*(ms + 10 for ms in E2ES[:50]), *E2ES[50:])), "samples", None),
])  # fmt: skip
def test_what_may_be(run, change, rule, severity):
    assert rules(change(run)).get(rule) == severity


def test_a_trimmed_window_is_a_note_with_its_reason():
    change = each(times(1.1, "tpot", "mean"), times(1.2, "throughput", tokens="output"),
                  of("workload", warmup_s=30.0, cooldown_s=20.0))  # fmt: skip
    found = examined(change(UNSAMPLED)).findings
    equations = [one for one in found if one.rule in ("e2e_identity", "throughput", "concurrency_limit")]
    assert {one.rule for one in equations} >= {"e2e_identity", "throughput"}
    assert {one.severity for one in equations} == {"note"}
    assert all("30 s of warm-up and 20 s of cool-down" in one.message for one in equations)


def test_another_clock_is_noted_and_a_throughput_of_a_gpu_is_held_against_all():
    kinds = (("throughput", "output"), ("throughput", "input"), ("throughput", "total"))
    change = each(times(0.99, "request_throughput"), *(times(0.99, n, tokens=kind) for n, kind in kinds))
    assert rules(change(UNSAMPLED)) == {"clock": "note"}
    run = times(1 / 8, "throughput", tokens="output")(UNSAMPLED)
    output = run.metric("throughput", tokens="output")
    of_a_gpu = [m.model_copy(update={"scope": "gpu"}) if m is output else m for m in run.metrics]
    assert rules(with_metrics(run, of_a_gpu)) == {}


def test_each_text_is_said_by_a_rule():
    source = "".join(path.read_text() for path in Path(common.__file__).parent.glob("*.py"))
    for rule, texts in read_toml(Path(common.__file__).with_name("texts.toml")).items():
        assert rule in source or rule.endswith(("_length", "throughput"))
        assert all(f'"{text}"' in source for text in texts), rule


# Runs that say little: one rule each


def small(*metrics, **said):
    return ServingRun(id="x", client="c", source="x", metrics=metrics, **said)


def e2e(value, statistic):
    return _metric("e2e", value, "ms", "request", statistic)


ONE_IS_LONG = (e2e(2125.0, "mean"), e2e(1e4, "max"))  # of eight requests: it is alone most of the time
AT_A_RATE = (e2e(5000.0, "mean"), _metric("request_throughput", 0.4, "req/s"))
EIGHT, EIGHTY = (OfferedLoad(concurrency=8, request_rate=0.0, num_prompts=sent) for sent in (8, 80))
COUNTED = {"nodes": 1, "totals": Totals(duration_s=16.94, output_tokens=2048)}
ITL = {"mean": 100.0, "median": 0.5}
OF_ONE_TOKEN = Totals(completed=8, output_tokens=8)
RATES = (_metric("request_throughput", 20.25, "req/s"), _metric("throughput", 648, "tok/s", tokens="output"))
UNSAID = {"unit": "tok/s", "scope": "node", "tokens": "unknown"}


@pytest.mark.parametrize(("rule", "severity", "metrics", "said"), [
    *[("concurrency_not_reached", severity, ONE_IS_LONG, {"workload": EIGHT, "totals": totals})
      for severity, totals in ((None, Totals(duration_s=10.0, completed=8)),
                               ("suspect", Totals(duration_s=1e3, completed=8)),
                               (None, Totals(duration_s=1e3, completed=8, failed=400)))],
    ("concurrency_not_reached", "suspect", AT_A_RATE, {"workload": EIGHTY}),
    ("concurrency_not_reached", None, AT_A_RATE,  # no more are in flight than are sent
     {"workload": EIGHTY.model_copy(update={"num_prompts": 2})}),
    *[("moments", severity, (e2e(1e3, "mean"), e2e(900.0, "min"), e2e(1100.0, "max"), e2e(deviation, "std")),
       {"totals": Totals(completed=100)}) for deviation, severity in ((150.0, "wrong"), (99.0, None))],
    *[("moments", severity, (e2e(1e3, "mean"), e2e(100.0, "std"), e2e(p10, "p10")), {})
      for p10, severity in ((750.0, None), (550.0, "wrong"))],
    *[("moments", severity, [_metric("itl", v, "ms", "request", s) for s, v in known.items()], {})
      for known, severity in ((ITL, "suspect"), (ITL | {"p25": 0.1}, None))],  # pieces of several tokens
    *[("moments", severity, (_metric("itl", 10.0, "ms", "request", "mean"), e2e(1e3, "p99"),
                             _metric("itl", std, "ms", "request", "std")), {})
      for std, severity in ((150.0, "suspect"), (141.0, None))],  # one pause as long as a request
    *[("plausible", severity, (_metric(name, value, unit, statistic="mean"),), {})
      for severity, name, unit, value in (("suspect", "tpot", "ms", 0.05), (None, "tpot", "ms", 5.0),
                                          ("suspect", "prefill", "ms", 1e8),
                                          ("suspect", "throughput", "tok/s", 1e9))],
    *[("throughput", severity, (*RATES, _metric("output_len", length, "tokens", "request", "mean")), {})
      for length, severity in ((32.0, None), (40.0, "wrong"), (25.0, "wrong"))],
    *[("zero", severity, (_metric(name, 0.0, "ms", "request", "mean"),), {"totals": OF_ONE_TOKEN})
      for name, severity in (("tpot", "note"), ("ttft", "suspect"))],
    *[("throughput", severity, (Metric(name="throughput", value=value, **UNSAID),), COUNTED)
      for value, severity in ((241.76, "wrong"), (120.9, None))],
])  # fmt: skip
def test_a_run_that_says_little(rule, severity, metrics, said):
    assert rules(small(*metrics, **said)).get(rule) == severity


def test_quantiles_of_samples_may_take_either_neighbour():
    ttfts, p90 = sorted(TTFTS), GOOD.value("ttft", "p90")
    for value, severity in ((ttfts[89], None), (ttfts[90], None), (ttfts[85], "wrong"), (ttfts[95], "wrong")):
        assert rules(times(value / p90, "ttft", "p90")(GOOD)).get("samples") == severity


def batch_run(prefill=16 * 1024 / 0.8, decode=16 * 64 / 1.1, total=16 * 1088 / 1.9) -> ServingRun:
    """What SGLang's bench_one_batch_server writes: 16 prompts of 1024 in, 64 out, 1.9 s."""
    return small(
        _metric("prefill_throughput", prefill, "tok/s", tokens="input"),
        _metric("decode_throughput", decode, "tok/s", tokens="output"),
        _metric("last_gen_throughput", 918.0, "tok/s", tokens="output"),
        _metric("throughput", total, "tok/s", tokens="total"),
        _metric("ttft", 800.0, "ms", "request", "max"), totals=Totals(duration_s=1.9),
        workload=OfferedLoad(input_len=1024, output_len=64, num_prompts=16, concurrency=16, request_rate=0.0),
    )  # fmt: skip


@pytest.mark.parametrize(("change", "rule", "severity"), [
    ({"prefill": 1e5}, "prefill_throughput", "wrong"), ({"decode": 500.0}, "decode_throughput", "wrong"),
    ({"total": 500.0}, "throughput", "suspect"),
])  # fmt: skip
def test_a_batch_in_lockstep(change, rule, severity):
    for run, wrong in ((batch_run(), {}), (batch_run(**change), {rule: severity})):
        assert {r: found for r, found in rules(run).items() if found != "note"} == wrong


def test_each_rate_of_a_batch_says_over_which_time_it_is_judged():
    """That of a decode step is not over the duration less that of prefill, as the rate of all decoding is."""
    run = batch_run(decode=500.0)
    rates = [_metric("decode_throughput", 500.0, "tok/s", statistic="median"),
             _metric("decode_step", 20.0, "ms", statistic="median")]  # fmt: skip
    kept = [metric for metric in run.metrics if metric.name != "ttft"]
    found = examined(run.model_copy(update={"metrics": (*kept, *rates)})).findings
    texts = [one.message for one in found if one.rule == "decode_throughput" and one.severity == "wrong"]
    assert ["(the duration less that of prefill)" in text for text in texts] == [True, False], texts


def test_times_in_seconds_are_no_response_in_one_piece():
    """Of a file without E2E, whose TPOT of 28 ms stands there as 0.028."""
    run = good_run()
    times = (_metric(name, ms / 1e3, "ms", "request", "mean") for name, ms in (("ttft", 400), ("tpot", 28)))
    rates = (metric for metric in run.metrics if metric.unit != "ms")
    found = rules(run.model_copy(update={"metrics": (*times, *rates), "samples": RequestSamples()}))
    assert "not_streamed" not in found and found["plausible"] == "suspect"
