"""`serving audit`: what is unlike or broken in the published documents is found by rules over the data, each
with its numbers; of the same data made good the rule says nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli.serving import serving
from harness.serving.audit import Audited, audit
from harness.serving.audit.corpus import Corpus, printed, same_engine, same_hardware
from harness.serving.audit.rows import by_kind
from harness.serving.audit.select import of_document
from harness.serving.clients.load import load
from harness.serving.published.documents import Claim, Configuration
from harness.serving.published.index import published_corpus, published_documents, raw_files
from harness.serving.schema import Metric, OfferedLoad, Parallelism, ServingRun, Totals
from tests.support.serving_files import DATA, FILES, VLLM_ROW

ALL = {one.id: of_document(one) for one in published_documents()}
RAW = {name: Audited(name, runs=tuple(runs)) for name, runs in raw_files().items()}
CORPUS = published_corpus()
MI350X, MOAI, ARTICLE = ALL["mi350x"], ALL["moai"], ALL["dstack-article"]
ONLINE = RAW["dstack/online_results.csv"]


def of(rule: str, audited: Audited, about: str = "", corpus: Corpus = CORPUS):
    """The findings of a rule, those that a run or claim is among the subjects of."""
    return [one for one in audit(audited, corpus) if one.rule == rule and about in ("", *one.subjects)]


def one(rule: str, audited: Audited, about: str = "", corpus: Corpus = CORPUS):
    """The only one, or the only one that is first of all about it."""
    found = of(rule, audited, about, corpus)
    (only,) = [f for f in found if f.subjects[:1] == (about,)] or found
    return only


def with_run(audited: Audited, name: str, **changes) -> Audited:
    assert any(run.id == name for run in audited.runs)
    return replace(
        audited, runs=tuple(r.model_copy(update=changes) if r.id == name else r for r in audited.runs)
    )


def with_claim(audited: Audited, name: str, **changes) -> Audited:
    assert any(claim.id == name for claim in audited.claims)
    claims = tuple(c.model_copy(update=changes) if c.id == name else c for c in audited.claims)
    return replace(audited, claims=claims)


def metric_of(audited: Audited, name: str, **changes) -> Audited:
    claim = next(claim for claim in audited.claims if claim.id == name)
    return with_claim(audited, name, metric=claim.metric.model_copy(update=changes))


# `serving audit`: what is unlike or broken in the published documents is found by rules over the data, each


def test_all_that_is_found_in_the_documents():
    """After a change that is meant, write what `serving audit --notes` prints into audit.txt."""
    done = CliRunner().invoke(serving, ["audit", "--notes"])
    assert done.exit_code == 1
    assert done.stdout == Path(__file__).with_name("audit.txt").read_text()


def without(audited, *names):
    return replace(audited, claims=tuple(claim for claim in audited.claims if claim.id not in names))


def run_of(audited, name):
    return next(run for run in audited.runs if run.id == name)


AMD, METHODS = ALL["amd-sglang"], ALL["dstack-methodology"]
SHAREGPT, LONG = run_of(MOAI, "moai-512-512-sharegpt"), run_of(MOAI, "moai-2000-2000-sharegpt")
COUNTED = SHAREGPT.totals.model_copy(update={"completed": round(7667539 / 512)})
ASKED = LONG.workload.model_copy(update={"warmup_s": 250.0, "cooldown_s": 290.0})
SAID = {"baseline": "Triton", "workload": OfferedLoad(input_len=1, output_len=1)}


@pytest.mark.parametrize(("rule", "found_in", "good", "about"), [
    ("table_mixes_scope", MI350X, without(MI350X, "mi350x-cmp-h200-vllm", "mi350x-cmp-h200-nim"),
     "mi350x-cmp-h200-trtllm"),
    ("total_read_as_output", MI350X, metric_of(MI350X, "mi350x-cmp-h200-sglang", tokens="total"),
     "mi350x-cmp-h200-sglang"),
    ("total_read_as_output", MI350X, metric_of(MI350X, "mi350x-cmp-h200-sglang", value=1262.2),
     "mi350x-cmp-h200-sglang"),
    ("table_mixes_mode", MI350X, without(MI350X, "mi350x-cmp-h200-sglang"), ""),
    ("single_request_differs", MI350X, metric_of(MI350X, "mi350x-single-tput", value=23.0), ""),
    ("tokens_over_time", with_run(MI350X, "mi350x-vllm-c128", totals=Totals(duration_s=16.0)), MI350X, ""),
    ("peaks_differ", MI350X, metric_of(MI350X, "mi350x-peak-server", value=2600.0), ""),
    ("counted_in_a_window", MOAI, with_run(MOAI, SHAREGPT.id, totals=COUNTED), SHAREGPT.id),
    ("prefill_left_out", MOAI, with_run(MOAI, SHAREGPT.id, parallelism=Parallelism(tp=1, dp=8)), SHAREGPT.id),
    ("itl_beside_tpot", ALL["inferencex-870"], ONLINE, ""),  # where ITL is TPOT within 7 %
    ("precision_differs", MOAI, MI350X, ""),  # --dtype auto
    ("command_and_log_disagree", MOAI, with_run(MOAI, LONG.id, workload=ASKED), ""),
    ("date_before_image", MI350X, replace(MI350X, date="2025-12-20"), ""),
    ("date_before_image", MI350X, replace(MI350X, date=""), ""),
    ("up_to", AMD, with_claim(AMD, "amd-aiter-mla", **SAID, refers_to=("dstack.online:2",)), "amd-aiter-mla"),
])  # fmt: skip
def test_a_rule_is_silent_on_what_is_good(rule, found_in, good, about):
    assert of(rule, found_in, about)
    assert not of(rule, good, about)


def test_it_is_the_number_that_finds_the_row_not_the_reference():
    alone = with_claim(MI350X, "mi350x-cmp-h200-sglang", refers_to=())
    assert "dstack.offline:18" in one("total_read_as_output", alone, "mi350x-cmp-h200-sglang").subjects
    # 2,200 is within its last digit of a dozen rows.
    assert not of("total_read_as_output", MI350X, "mi350x-cmp-h200-vllm")


def test_batches_of_single_rows():
    found = one("batch_below_concurrency", ONLINE, "dstack.online:20")
    assert found.numbers["concurrency"] == 128 and found.numbers["batch"] == pytest.approx(53.45, abs=0.05)
    assert not of("batch_below_concurrency", ONLINE, "dstack.online:21")  # 64 in flight, 49.7 decode
    assert len(of("column_shift", ONLINE)) == 9 and of("completed", ONLINE)


@pytest.mark.parametrize(("claim", "value"), [("mi350x-per-gpu", 340.0), ("mi350x-peak-client", 2700.5)])
def test_numbers_that_do_not_hold_when_computed_again(claim, value):
    found = one("recomputed", metric_of(MI350X, claim, value=value), claim)
    assert found.severity == "wrong" and found.numbers["holds"] == 0
    assert one("recomputed", MI350X, claim).severity == "note"


def test_a_trend_said_the_other_way_round():
    name = "dstack-ttft-length-h200-others"
    said = next(claim for claim in ARTICLE.claims if claim.id == name).trend
    falls = with_claim(ARTICLE, name, trend=said.model_copy(update={"says": "falls"}))
    assert one("trends", falls, name).numbers["breaks"] == 2
    assert one("trends", ARTICLE, name).numbers == {"series": 2, "breaks": 0}


# Runs and documents that are good are left alone; odd ones are audited all the same


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


def test_every_clients_file_is_audited():
    assert command(*map(str, FILES), "--fail-on", "never").exit_code == 0


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


# `serving audit` as a user calls it, on documents and on files of one's own


def command(*arguments: str):
    return CliRunner().invoke(serving, ["audit", *arguments])


@pytest.mark.parametrize("fail_on, code", [("wrong", 0), ("suspect", 1), ("never", 0)])
def test_what_fails_is_chosen(fail_on, code):
    assert command("amd-sglang", "--fail-on", fail_on).exit_code == code


def test_files_of_one_point_each_are_one_sweep(tmp_path):
    """As vllm bench serve writes them."""
    names = []
    for limit, out in ((32, 900.0), (64, 1500.0), (128, 800.0)):
        tokens = {"total_input_tokens": 2000000, "total_output_tokens": round(out * 100)}
        rates = {
            "output_throughput": out,
            "total_token_throughput": out + 20000.0,
            "request_throughput": 20.0,
        }
        counts = {"max_concurrency": limit, "num_prompts": 2000, "completed": 2000, "duration": 100.0}
        no_latencies = {key: value for key, value in VLLM_ROW.items() if not key.endswith("_ms")}
        whole = no_latencies | tokens | rates | counts
        names.append(str(tmp_path / f"c{limit}.json"))
        (tmp_path / f"c{limit}.json").write_text(json.dumps(whole))
    result = command(*names)
    assert "3 files" in result.stdout and "throughput falls by 47%" in result.stdout
    assert "throughput falls" not in command(names[2]).stdout
    other = Path(names[2])
    other.write_text(other.read_text().replace("deepseek-ai/DeepSeek-R1", "a/b"))
    assert "throughput falls" not in command(*names).stdout


def test_kinds_of_unlike_scopes_are_not_added():
    run = load(DATA / "inferencex_api.json")[2]
    assert {m.scope for m in run.metrics if m.name == "throughput"} == {"gpu", "decode_gpu", "prefill_gpu"}
    assert by_kind(run) == {"total": run.value("throughput", tokens="total")}


def test_what_is_neither_file_nor_document():
    result = command("nothing-of-the-kind")
    assert result.exit_code != 0 and "neither a file nor a document" in str(result.exception)


def test_a_broken_file_costs_itself_only(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    result = command(str(tmp_path / "bad.json"), "inferencex-870")
    assert result.exit_code == 2 and "inferencex-870" in result.stdout


def test_the_rules_are_listed():
    assert "batch_below_concurrency" in command("--rules").stdout
