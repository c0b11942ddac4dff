"""guidellm: what its words mean, in three versions of its report."""

from __future__ import annotations

import pytest

from harness.serving.clients.files import UnreadableError
from tests.support.serving_files import DATA, changed, noted, of, rules, shapes, written


def test_every_value_of_0_7():
    (run,) = of("guidellm_0.7.3.json")
    assert (run.client, run.model, run.mode, run.workload.concurrency) == ("guidellm", "mock", "online", 2)
    assert run.extra["guidellm_version"] == "0.7.3"
    assert run.totals.model_dump() == {
        "duration_s": pytest.approx(0.5057857), "completed": 3, "failed": 0, "input_tokens": 39,
        "output_tokens": 96,
    }  # fmt: skip
    values = shapes(run)
    expected = {
        ("throughput", "total", "output"): (96 / 0.5057857036590576, "tok/s", "instance"),
        ("throughput", "total", "input"): (39 / 0.5057857036590576, "tok/s", "instance"),
        ("throughput", "total", "total"): (135 / 0.5057857036590576, "tok/s", "instance"),
        ("request_throughput", "total", "none"): (3 / 0.5057857036590576, "req/s", "instance"),
        ("output_tokens_per_second", "mean", "output"): (243.87245931604812, "tok/s", "instance"),
        ("requests_per_second", "mean", "none"): (5.931365750943119, "req/s", "instance"),
        ("e2e", "mean", "none"): (265.1112874348958, "ms", "request"),
        ("e2e", "std", "none"): (29.78019463134745, "ms", "request"),
        ("e2e", "p99.9", "none"): (292.6297187805176, "ms", "request"),
        ("tpot", "mean", "none"): (5.39497918980096, "ms", "request"),
        ("tpot", "p0.1", "none"): (5.322464050785188, "ms", "request"),
        ("time_per_output_token", "mean", "none"): (8.190805713335672, "ms", "request"),
        ("output_len", "mean", "output"): (32.0, "tokens", "request"),
        ("input_len", "max", "input"): (17.0, "tokens", "request"),
    }
    assert {key: values[key][0] for key in expected} == pytest.approx({k: v[0] for k, v in expected.items()})
    assert {key: values[key][1:] for key in expected} == {key: value[1:] for key, value in expected.items()}
    assert "duration" in run.metric("throughput").derived
    assert run.samples.output_lens == (32, 32, 32)
    assert run.samples.e2es_ms == pytest.approx((278.9626121520996, 292.6297187805176, 223.7415313720703))
    assert rules(run) == []
    assert noted(run) == ["e2e_identity"]  # 3 ms from the last token to the response's end


def test_tpot_is_the_one_that_others_report():
    """mean E2E = mean TTFT + (n - 1) TPOT holds of `tpot`, not of time_per_output_token; the request ends
    a little after its last token."""
    for name in ("guidellm_0.7.3.json", "guidellm_0.3.1.json"):
        (run,) = of(name)
        whole = run.value("ttft", "mean") + 31 * run.value("tpot", "mean")
        assert run.value("e2e", "mean") == pytest.approx(whole, rel=0.02)
        assert run.value("itl") is None
        assert "another quantity" in run.notes[0]


def test_0_3():
    (run,) = of("guidellm_0.3.1.json")
    assert (run.client, run.model, run.workload.concurrency) == ("guidellm", "mock", 2)
    assert run.totals.model_dump() == {
        "duration_s": pytest.approx(1.1754190921783447), "completed": 8, "failed": 0, "input_tokens": 138,
        "output_tokens": 256,
    }  # fmt: skip
    assert run.value("e2e", "mean") == pytest.approx(289.8824214935303)
    assert run.value("tpot", "mean") == pytest.approx(6.261186253639959)
    assert run.value("time_per_output_token", "mean") == pytest.approx(6.065524183213711)
    assert len(run.samples.ttfts_ms) == 8
    assert run.findings == ()


def test_statistics_of_no_request_are_no_numbers(tmp_path):
    def change(content):
        zero = {"mean": 0.0, "median": 0.0, "count": 0, "total_sum": 0.0, "percentiles": {"p50": 0.0}}
        content["benchmarks"][0]["metrics"]["time_to_first_token_ms"]["successful"] = zero

    (run,) = changed(tmp_path, "guidellm_0.7.3.json", change)
    assert run.value("ttft") is None


def test_incomplete_and_errored_requests_are_told(tmp_path):
    def change(content):
        totals = content["benchmarks"][0]["metrics"]["request_totals"]
        totals |= {"incomplete": 4, "errored": 2, "total": 9}

    (run,) = changed(tmp_path, "guidellm_0.7.3.json", change)
    assert run.totals.failed == 2
    assert "4 incomplete and 2 errored" in run.notes[1]


@pytest.mark.parametrize(
    ("strategy", "concurrency", "rate"),
    [
        ({"type_": "synchronous"}, 1, None),
        ({"type_": "throughput", "max_concurrency": 512}, 512, 0),
        ({"type_": "constant", "rate": 4.5, "max_concurrency": None}, None, 4.5),
        ({"type_": "poisson", "rate": "fast"}, None, None),
        ("odd", None, None),
    ],
)
def test_strategies(tmp_path, strategy, concurrency, rate):
    def change(content):
        content["benchmarks"][0]["config"]["strategy"] = strategy

    (run,) = changed(tmp_path, "guidellm_0.7.3.json", change)
    assert (run.workload.concurrency, run.workload.request_rate) == (concurrency, rate)


def test_one_run_for_each_benchmark_and_missing_keys(tmp_path):
    def change(content):
        first = content["benchmarks"][0]
        second = {
            "metrics": {k: first["metrics"][k] for k in ("requests_per_second", "time_per_output_token_ms")}
        }
        content["benchmarks"].append(second)

    first, second = changed(tmp_path, "guidellm_0.7.3.json", change)
    assert second.id.endswith("benchmarks[1]")
    assert second.value("time_per_output_token", "mean") == first.value("time_per_output_token", "mean")
    assert second.value("throughput") is None
    assert second.totals.completed is None


def test_prompts_and_answers_are_not_kept(tmp_path):
    def change(content):
        content["benchmarks"][0]["requests"]["successful"][0]["output"] = "a secret"

    (run,) = changed(tmp_path, "guidellm_0.7.3.json", change)
    assert "a secret" not in run.model_dump_json()


def test_samples_that_are_none(tmp_path):
    def change(content):
        content["benchmarks"][0]["requests"]["successful"][0]["output_tokens"] = "many"

    (run,) = changed(tmp_path, "guidellm_0.7.3.json", change)
    assert run.samples.output_lens == ()
    assert rules(run) == ["unreadable"]


CSV = "guidellm_0.8.1.csv"


def test_every_value_of_the_csv():
    """Beside the JSON of the same runs."""
    first, second = of(CSV)
    assert (first.client, first.model, first.workload.concurrency) == ("guidellm", "mock", 2)
    assert second.workload.concurrency == 4
    assert first.totals.model_dump() == {
        "duration_s": pytest.approx(0.9031984806060791), "completed": 8, "failed": 0, "input_tokens": 177,
        "output_tokens": 256,
    }  # fmt: skip
    assert first.workload.warmup_s == first.workload.cooldown_s == 0
    values = shapes(second)
    assert values["throughput", "total", "output"][0] == pytest.approx(256 / 0.40480613708496094)
    assert values["ttft", "p99", "none"][0] == pytest.approx(47.591447830200195)
    assert values["tpot", "mean", "none"][0] == pytest.approx(5.164139693783175)
    assert values["tpot", "min", "none"][0] == pytest.approx(5.037569230602633)
    assert values["e2e", "std", "none"][0] == pytest.approx(8.462853081339077)
    assert values["e2e", "p0.1", "none"][0] == pytest.approx(185.699462890625)
    assert values["output_tokens_per_second", "median", "output"][0] == pytest.approx(659.1708313688512)
    assert values["concurrency", "max", "none"][0] == pytest.approx(4.0)
    assert values["input_len", "p25", "input"][0] == pytest.approx(23.0)
    assert ("ttft", "p99.9", "none") not in values  # the file leaves it out
    assert first.findings == second.findings == ()


CELLS = {
    "a percentile too few": ("[", "[1.0, ", "entries, not 11"),
    "percentiles that are none": ("[", "(", "is no list in JSON"),
}


@pytest.mark.parametrize("case", CELLS)
def test_cells_of_the_csv_that_are_wrong(tmp_path, case):
    old, new, why = CELLS[case]
    text = (DATA / CSV).read_text().replace(old, new)
    for run in written(tmp_path, text, CSV):
        assert run.value("ttft", "p99") is None
        assert run.value("ttft", "mean") is not None
        assert any(why in finding.message for finding in run.findings)


@pytest.mark.parametrize(
    ("strategy", "concurrency", "rate"),
    [
        ("synchronous", 1, None),
        ("throughput@512", 512, 0),
        ("throughput@unlimited", None, 0),
        ("constant@4.50", None, 4.5),
        ("poisson@fast", None, None),
    ],
)
def test_strategies_of_the_csv(tmp_path, strategy, concurrency, rate):
    text = (DATA / CSV).read_text().replace("concurrent@2", strategy)
    run = written(tmp_path, text, CSV)[0]
    assert (run.workload.concurrency, run.workload.request_rate) == (concurrency, rate)


def test_a_name_that_stands_twice_in_all_lines_of_a_header(tmp_path):
    lines = (DATA / CSV).read_text().split("\n")
    lines[1] = lines[1].replace("Warmup", "Duration")
    with pytest.raises(UnreadableError, match="a column name stands twice"):
        written(tmp_path, "\n".join(lines), CSV)


def test_numbers_are_no_second_line_of_a_header(tmp_path):
    with pytest.raises(UnreadableError, match="a column name stands twice"):
        written(tmp_path, "rate,rate\n1,2\n3,4\n", "a.csv")
