"""What stands in an A/B's record before its first launch, and beside its outcome."""

import json

import pytest

from harness.cli.serving.ab_display import planned, shown
from harness.errors import UsageError
from harness.report.terminal import plain_text
from harness.serving.ab import expected
from harness.serving.ab.expected import changes_of, predicted
from harness.serving.ab.plan import read_plan
from harness.serving.ab.record import Record
from harness.serving.ab.result import summary
from harness.serving.ledger import KernelChange
from tests.support.paths import ROOT

TOGGLED = ROOT / "results" / "epyc-zen4-2core" / "toggle" / "onednn"
CLIENT = "bench {url} --seed {seed} --out {result} --random-input-len 1024 --random-output-len 1024"


def plan_of(**env):
    arms = {"base": {}, "changed": {"env": env}}
    client, launch = f"{CLIENT} --max-concurrency 64", "serve --port {port} --tp 8"
    return read_plan({"launch": launch, "client": client, "arms": arms, "pairs": 2}, "a test")


def prediction(change=-2.0, low=-3.0, high=-1.0, **more):
    return {"quantity": "tpot", "unit": "ms", "method": "link", "change": change, "low": low, "high": high,
            "before": 20.0, **more}  # fmt: skip


def test_a_run_with_both_settings_says_what_the_op_gained():
    """torch.bf16 takes 3.43 ms without the variable, where it is the fastest, and 30.67 ms with it."""
    (change,) = changes_of(plan_of(ONEDNN_MAX_CPU_ISA="AVX2", OTHER="1"), "changed", [str(TOGGLED)])
    assert change.op == "block_scale_gemm" and change.factor == pytest.approx(3430.6 / 30673.7, rel=1e-3)
    assert (change.low, change.high) == (change.factor, change.factor), "of one case"
    assert not list(changes_of(plan_of(ONEDNN_MAX_CPU_ISA="AMX"), "changed", [str(TOGGLED)]))
    with pytest.raises(UsageError, match="no run timed a kernel under the variables of both arms"):
        predicted(plan_of(X="1"), [str(TOGGLED)])


def test_the_link_says_what_that_is_worth_to_the_arm(monkeypatch):
    h200 = str(ROOT / "results" / "h200" / "mla_decode-b64")
    change = KernelChange(op="mla_decode", factor=1.5, low=1.4, high=1.6, source=h200)
    monkeypatch.setattr(expected, "changes_of", lambda *_: [change])
    found = predicted(plan_of(X="1"), [h200])
    assert "expected: changed: TPOT, mean changes by -" in planned(plan_of(X="1"), None, ROOT, [], found)
    (tpot,) = [each for each in found if each.quantity == "tpot"]
    assert tpot.of == "changed" and -2 < tpot.change < -0.2 and 15 < tpot.before < 60


def test_a_file_is_taken_for_the_client_s_own_load(tmp_path):
    file = tmp_path / "what-if.json"
    load = {"isl": 1024, "osl": 1024}
    workloads = [{"load": load | {"concurrency": n}, "changes": [prediction(change=-n, assumptions=[])]}
                 for n in (4, 64)]  # fmt: skip
    about = {"hardware": "h200", "engine": "sglang", "gpus": 8, "workloads": workloads}
    file.write_text(json.dumps(about))
    (found,) = predicted(plan_of(X="1"), [str(file)])
    assert found.change == -64
    assert "note: predicted of DeepSeek-R1 on 8 x H200" in planned(plan_of(X="1"), None, ROOT, [], [found])
    file.write_text(json.dumps(about | {"gpus": 4}))
    with pytest.raises(UsageError, match="no prediction for this plan: it is of gpus 4, in the plan 8"):
        predicted(plan_of(X="1"), [str(file)])
    client = CLIENT.replace("input-len 1024", "input-len 8192") + " --max-concurrency 64"
    other = plan_of(X="1").model_copy(update={"launch": "vllm serve {port}", "client": client})
    with pytest.raises(UsageError, match="engine sglang, in the plan vllm; isl 1024, in the plan 8192"):
        predicted(other, [str(file)])
    file.write_text(json.dumps(about | {"workloads": workloads[:1]}))
    with pytest.raises(UsageError, match="does not hold one prediction for 64 in flight"):
        predicted(plan_of(X="1"), [str(file)])


@pytest.mark.parametrize(("tpot", "meets"), [((18.0, 18.1), True), ((20.0, 20.001), False)])
def test_what_was_expected_stands_beside_what_was_found(tmp_path, tpot, meets):
    known = [prediction(), prediction(of="another arm"), prediction(quantity="decode_step")]
    record = Record.begin(tmp_path / "out", plan_of(X="1"), {"names": [], "predictions": known})
    for pair in (1, 2):
        for arm, value in (("base", 20.0), ("changed", tpot[pair - 1])):
            metrics = dict.fromkeys(("ttft", "ttft_median", "throughput")) | {"tpot": value}
            about = {"pair": pair, "attempt": 0, "arm": arm}
            record.append("measured", **about, metrics=metrics, suspect={}, output_tokens=1)
        record.append("pair", pair=pair, attempt=0)
    found = summary(Record(tmp_path / "out"))
    (line,) = found["expected"]
    assert (line["change"], line["low"], line["high"]) == (-10, -15, -5) and line["meets"] is meets
    says = f"by -10.00 % (-15.00 to -5.00), and did by {line['found']:+.2f} %: the intervals"
    text = " ".join(plain_text(shown(found)).split())
    assert f"changed: TPOT, mean was expected to change {says} {'meet' if meets else 'do not meet'}" in text
