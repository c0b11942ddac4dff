"""`serving audit`: what is unlike or broken in the published documents is found by rules over the data, each
with its numbers; of the same data made good the rule says nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli.serving import serving
from harness.serving.schema import OfferedLoad, Parallelism, Totals
from tests.support.audits import ALL, ARTICLE, MI350X, MOAI, ONLINE, metric_of, of, one, with_claim, with_run


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
