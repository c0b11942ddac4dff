"""What a user records: a prediction of the link, then what serving runs showed, in one row of a ledger."""

from __future__ import annotations

import json

import pytest

from harness.cli.serving import serving
from harness.errors import UsageError
from harness.serving.ledger.ledger import read, rows
from harness.serving.ledger.observe import observe, t_interval
from harness.serving.ledger.residuals import residuals
from tests.support.serving_files import DATA, VLLM_ROW


def link(*words):
    serving(["link", "--concurrency", "16", *map(str, words)], standalone_mode=False)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    with pytest.raises(SystemExit, match="0"):
        link("--what-if", "fused_moe=1.3x", "--ledger", path, "--row", "moe")
    return path.read_text()


@pytest.fixture
def ledger(tmp_path, predicted):
    path = tmp_path / "ledger.jsonl"
    path.write_text(predicted)
    return path


def result(tmp_path, name, **changed):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(VLLM_ROW | changed))
    return str(path)


def test_predicted_then_observed(tmp_path, ledger, capsys):
    before = [result(tmp_path, f"a{i}", mean_tpot_ms=17.3 + i / 10) for i in range(4)]
    after = [result(tmp_path, f"b{i}", mean_tpot_ms=14.7 + i / 9) for i in range(4)]
    files = [f"--{side}={name}" for side, names in (("before", before), ("after", after)) for name in names]
    serving(["observe", str(ledger), "moe", "--assume=all", *files], standalone_mode=False)
    [row] = rows(read(ledger))
    found = {one.quantity: one for one in residuals(row)}
    assert set(found) == {"tpot", "ttft", "output_throughput"}
    tpot = found["tpot"]
    assert tpot.blind and tpot.verdict == "explained" and tpot.observed == pytest.approx(-2.583, abs=0.001)
    assert tpot.observed_low < -2.583 < tpot.observed_high < -2.5
    assert found["ttft"].verdict in ("missed", "not resolved")
    printed = capsys.readouterr().out
    assert not row.explanations
    assert "tpot" in printed and "taken as alike without being said: hardware, GPUs, precision" in printed


def test_unlike_runs_are_refused_and_nothing_is_written(tmp_path, ledger):
    text = ledger.read_text()
    before = result(tmp_path, "a")
    with pytest.raises(UsageError, match="1 runs before and 2 after"):
        observe(ledger, "moe", [before], [before, before], assumed=["all"])
    with pytest.raises(UsageError, match="no row 'mla'; rows: moe"):
        observe(ledger, "mla", [before], [before])
    assert ledger.read_text() == text


def test_numbers_that_cannot_hold_are_written_down_beside(tmp_path, ledger):
    before, after = result(tmp_path, "a"), result(tmp_path, "b", duration=120.0)
    observe(ledger, "moe", [before], [after], assumed=["all"])
    [row] = rows(read(ledger))
    assert [e.text.partition(": ")[0] for e in row.explanations] == [
        "`serving load` finds numbers of 1 of these runs wrong"
    ]


def test_throughput_a_gpu_is_observed_of_the_instance(tmp_path, ledger):
    """InferenceX's files are per GPU; what was predicted is not."""
    row = json.loads((DATA / "inferencex_agg.json").read_text()) | {"conc": 16}
    files = []
    for name, factor in (("a", 1.0), ("b", 1.1)):
        files.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_text(json.dumps(row | {"output_tput_per_gpu": 100.0 * factor}))
    observe(ledger, "moe", files[:1], files[1:], assumed=["all"])
    [of_output] = [
        entry.observation
        for entry in rows(read(ledger))[0].observations
        if entry.observation.quantity == "output_throughput"
    ]
    assert (of_output.before, of_output.after) == pytest.approx((800.0, 880.0))


def test_a_row_is_opened_once(ledger):
    with pytest.raises(UsageError, match="has a row 'moe' already"):
        link("--what-if", "fused_moe=1.3x", "--ledger", ledger, "--row", "moe")
    with pytest.raises(UsageError, match="--what-if"):
        link("--ledger", ledger, "--row", "x")


def test_students_interval():
    mean, half = t_interval([1.0, 2.0, 3.0, 4.0])
    assert (mean, half) == (2.5, pytest.approx(2.3534 * 1.29099 / 2, rel=1e-4))
    assert t_interval([1.0]) == (1.0, None)
