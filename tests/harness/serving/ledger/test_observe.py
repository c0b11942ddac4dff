"""`serving observe`: what serving runs showed before and after a change, in a row of a ledger."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.cli.serving import serving
from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.compare.identity import FIELDS, Setting
from harness.serving.ledger import (
    ChangeEntry,
    KernelChange,
    Prediction,
    PredictionEntry,
    append,
    ledger_lines,
    observation,
    observe,
    read,
    rows,
)
from harness.serving.schema import Metric, OfferedLoad, Parallelism, ServingRun
from tests.support.serving_files import DATA, SGLANG_ROW, VLLM_ROW

SETTING = Setting(
    hardware="H200", gpus=8, engine="sglang", model="DeepSeek-R1", precision="fp8 block-scale",
    kv_cache="bfloat16", plain=True, launch="graph", parallelism=Parallelism(tp=8, pp=1, ep=1, dp=1),
    workload=OfferedLoad(input_len=922, output_len=922, range_ratio=0.8, concurrency=16, request_rate=0.0,
                         num_prompts=160),
)  # fmt: skip
UNITS = {"tpot": "ms", "ttft": "ms", "output_throughput": "tok/s", "decode_step": "ms"}


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    made = [Prediction(quantity=name, unit=unit, method="link", change=-2.5, low=-4.0, high=-1.0)
            for name, unit in UNITS.items()]  # fmt: skip
    opening = ChangeEntry(row="moe", changes=(KernelChange(op="fused_moe", factor=1.3),), setting=SETTING)
    append(path, opening, *(PredictionEntry(row="moe", prediction=each, at="2026-01-01") for each in made))
    return path


def written(path: Path, row: dict[str, Any] = VLLM_ROW, **changes: Any) -> str:
    path.write_text(json.dumps(row | changes))
    assert load(str(path)), "not read"
    return str(path)


def sides(tmp_path, before=(), after=(), row=VLLM_ROW):
    """Two files of a run before and after, with changed keys."""
    return ([written(tmp_path / "a.json", row, **dict(before))],
            [written(tmp_path / "b.json", row, **({"mean_tpot_ms": 11.9} | dict(after)))])  # fmt: skip


def test_predicted_then_observed(tmp_path, ledger, capsys):
    before = [written(tmp_path / f"a{i}.json", mean_tpot_ms=12.0 + i / 10) for i in range(4)]
    after = [written(tmp_path / f"b{i}.json", mean_tpot_ms=9.4 + i / 9) for i in range(4)]
    files = [f"--{side}={name}" for side, names in (("before", before), ("after", after)) for name in names]
    serving(["observe", str(ledger), "moe", "--assume=all", *files], standalone_mode=False)
    [row] = rows(read(ledger))
    found = {line.quantity: line for line in ledger_lines(row) if line.observation}
    assert set(found) == {"tpot", "ttft", "output_throughput"}
    moved = [[shutil.copy(side[2], f"{side[2]}.moved.json")] for side in (before, after)]
    with pytest.raises(UsageError, match=r"row moe of .* has .*a2.json.moved.json, .* already; a run counts"):
        observe(ledger, "moe", *moved, assumed=["all"])
    tpot = found["tpot"]
    assert tpot.blind and tpot.verdict == "explained"
    assert tpot.observation.change == pytest.approx(-2.583, abs=0.001)
    assert tpot.observation.low < -2.583 < tpot.observation.high < -2.5
    assert (found["ttft"].verdict, found["ttft"].observation.change) == ("missed", 0.0)
    assert "taken to be alike without being said: hardware, GPUs, precision" in capsys.readouterr().out


def test_unlike_runs_are_refused_and_nothing_is_written(tmp_path, ledger):
    text = ledger.read_text()
    a, b = written(tmp_path / "a.json"), written(tmp_path / "b.json", mean_tpot_ms=9.0)
    copy = written(tmp_path / "c.json")
    lacks = dict.fromkeys(("mean_tpot_ms", "mean_ttft_ms", "output_throughput"))
    less = written(tmp_path / "d.json", **lacks)
    wrong = written(tmp_path / "e.json", completed=200)
    for row, before, after, assumed, says in (
        ("moe", [a], [a, a], ["all"], "1 runs before and 2 after"),
        ("mla", [a], [a], ["all"], "no row 'mla'; rows: moe"),
        ("moe", [a, copy], [b, b], ["all"], r"c.json: .* that of .*a.json: the same run again; a run counts"),
        ("moe", [a], [less], ["all"], "none of tpot, ttft, output_throughput, .* is in all of these runs"),
        ("moe", [a], [wrong], ["all"], "`serving load` finds numbers of 1 of these runs wrong"),
        ("moe", [a], [b], ["weather"], f"property 'weather' of --assume; .*: all, {', '.join(FIELDS)}"),
        ("moe", [a], [b], [], r"no run of this row: the run does not say, .*, its hardware .*--assume"),
    ):
        with pytest.raises(UsageError, match=says):
            observe(ledger, row, before, after, assumed=assumed)
    assert ledger.read_text() == text


def served(**changes: Any) -> dict[str, Any]:
    degrees = {"tp_size": 8, "pp_size": 1, "dp_size": 1, "ep_size": 1}
    return {"server_info": degrees | {"version": "0.5.9", "max_running_requests": 64} | changes}


@pytest.mark.parametrize("changes", [
    served(kv_cache_dtype="fp8_e4m3"), served(cuda_graph_max_bs=8), served(quantization="w8a8_int8"),
    served(nnodes=2), {"max_concurrency": 64}, {"completed": 150}, {"total_input_tokens": 160 * 64},
])  # fmt: skip
def test_a_run_of_another_setting_is_refused_before_after_and_on_both_sides(tmp_path, ledger, changes):
    text = ledger.read_text()
    for before, after in ((changes, {}), ({}, changes), (changes, changes)):
        files = sides(tmp_path, served() | before, served() | after, SGLANG_ROW)
        with pytest.raises(UsageError, match=r"is no run of this row|wrong: "):
            observe(ledger, "moe", *files, assumed=["all"])
    assert ledger.read_text() == text


def test_what_the_row_does_not_say_has_to_be_alike_before_and_after(tmp_path, ledger):
    files = sides(tmp_path, served(version="0.5.8"), served(), SGLANG_ROW)
    with pytest.raises(UsageError, match=r"differ in more than the row's change: version 0\.5\.8 before"):
        observe(ledger, "moe", *files, assumed=["all"])
    files = sides(tmp_path, served(), served(version="0.5.9.post1"), SGLANG_ROW)
    observe(ledger, "moe", *files, assumed=["all"])
    texts = [entry.text for entry in rows(read(ledger))[0].explanations]
    assert texts == ["version: 0.5.9 before, 0.5.9.post1 after"]


def test_server_flags_that_differ_are_written_beside(tmp_path, ledger):
    before, after = served(enable_torch_compile=False), served(enable_torch_compile=True, pid=8)
    files = sides(tmp_path, before, after, SGLANG_ROW)
    observe(ledger, "moe", *files, assumed=["all"], explanation="so it is")
    assert [entry.text for entry in rows(read(ledger))[0].explanations] == [
        "so it is", "before against after: flags that differ: enable_torch_compile unset | on"]  # fmt: skip


def test_the_engine_is_told_where_files_do_not_say_it(tmp_path, ledger):
    spoken = {"backend": "vllm", "endpoint_type": "vllm"}
    files = sides(tmp_path, spoken, spoken)
    others = [name for name in FIELDS if name != "engine"]
    with pytest.raises(UsageError, match=r"the run does not say, as the other does, its engine \(sglang\)"):
        observe(ledger, "moe", *files, assumed=others)
    with pytest.raises(UsageError, match="engine vllm, not sglang"):
        observe(ledger, "moe", *files, assumed=others, engine="vllm")
    observe(ledger, "moe", *files, assumed=others, engine="sgl")


def test_throughput_a_gpu_is_observed_of_the_instance(tmp_path, ledger):
    """InferenceX's files are per GPU; what was predicted is not."""
    row = json.loads((DATA / "inferencex_agg.json").read_text())
    load = SETTING.workload.model_copy(update={"concurrency": 64, "num_prompts": None})
    opening = ChangeEntry(row="c64", changes=(), setting=SETTING.model_copy(update={"workload": load}))
    made = Prediction(quantity="output_throughput", unit="tok/s", method="link", change=90.0)
    append(ledger, opening, PredictionEntry(row="c64", prediction=made))
    rates = [{"output_tput_per_gpu": us, "tput_per_gpu": us + 217.6} for us in (217.9, 227.9)]
    a, b = (written(tmp_path / f"{number}.json", row, **each) for number, each in enumerate(rates))
    observe(ledger, "c64", [a], [b], assumed=["all"])
    seen = {one.observation.quantity: one.observation for one in rows(read(ledger))[1].observations}
    found = seen["output_throughput"]
    assert (found.before, found.after) == pytest.approx((1743.2, 1823.2))


OUTPUT = Metric(name="throughput", value=80.0, unit="tok/s", scope="gpu", tokens="output")
RUN = ServingRun(id="a", client="sglang.bench_serving", source="a", gpus=8, mode="online",
                 workload=SETTING.workload, metrics=(OUTPUT,))  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), [
    ({"mode": "offline"}, "not alike: .*mode"),
    ({"metrics": (OUTPUT.model_copy(update={"scope": "instance"}),)}, "they need normalising"),
    ({"gpus": None}, "not known of how many GPUs"),
])  # fmt: skip
def test_a_pair_has_to_be_of_one_kind(changes, says):
    with pytest.raises(UsageError, match=f"output_throughput of a and b: .*{says}"):
        observation("output_throughput", [(RUN, RUN.model_copy(update={"id": "b"} | changes))])
    assert observation("tpot", [(RUN, RUN)]) is None


def test_latencies_are_the_means_that_clients_report():
    kinds = [(name, which) for name in ("itl", "e2e", "ttft", "tpot") for which in ("median", "mean")]
    metrics = [Metric(name=name, value=n, unit="ms", scope="request", statistic=which)
               for n, (name, which) in enumerate(kinds, 1)]  # fmt: skip
    run = RUN.model_copy(update={"metrics": tuple(metrics)})
    assert [observation(name, [(run, run)]).before for name in ("itl", "e2e", "ttft", "tpot")] == [2, 4, 6, 8]
