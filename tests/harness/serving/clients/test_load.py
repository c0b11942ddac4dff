"""`serving load`: what is printed, what is written, and its exit codes."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import cli
from harness.errors import UsageError
from harness.paths import ROOT
from harness.serving import load
from harness.serving.clients.report import as_text
from harness.serving.schema import Metric, ServingRun
from tests.support.serving_mutations import DATA, examples, mutations

GOOD = DATA / "sglang_bench_serving_0.5.23.jsonl"
SHIFTED = DATA / "dstack_online.csv"


def run(*arguments: object):
    return CliRunner().invoke(cli, ["serving", "load", *map(str, arguments)])


def test_a_table_then_findings_then_a_count():
    done = run(GOOD, DATA / "dstack_offline.csv", SHIFTED)
    assert done.exit_code == 1
    sglang, offline, online, legend, *_, count = done.stdout.strip().split("\n\n")[1:]
    assert sglang.startswith("sglang.bench_serving\n")
    assert "437.76 / instance" in sglang
    assert "1084 / node *" in offline
    assert "914.74 / node" in online
    assert legend.startswith("* derived")
    assert "\nwrong:\n  dstack_online.csv:4: column_shift: " in done.stdout
    assert "  all" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 180
    assert done.stdout.count("repaired: ") == 1
    assert count == "8 runs in 3 files; found 1 wrong, 1 suspect, 2 notes (2 runs wrong or suspect)"


def test_a_file_that_holds():
    done = run(GOOD)
    assert done.exit_code == 0
    assert "derived" not in done.stdout


@pytest.mark.parametrize("path", examples(), ids=lambda path: path.name)
def test_every_run_shows_a_number(path):
    done = run(path)
    for one in load(path):
        row = next(line for line in done.stdout.splitlines() if line.startswith(Path(one.id).name))
        numbers = [cell for cell in row.split()[1:] if cell.lstrip("-").replace(".", "").isdigit()]
        assert numbers or not one.metrics, row  # a configuration has none


def test_a_file_that_cannot_be_read_costs_itself_only(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"a": 1')
    done = run(broken, GOOD, tmp_path)
    assert done.exit_code == 2
    lines = done.stderr.splitlines()
    assert [line.startswith(f"error: cannot read {tmp_path}") for line in lines] == [True, True]
    assert "directory" in lines[1]
    assert "1 run in 1 file" in done.stdout
    assert "2 files not read" in done.stdout


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_an_unwritable_target_is_found_before_reading(tmp_path, option):
    done = run(tmp_path / "missing", option, tmp_path / "no" / "such")
    assert isinstance(done.exception, UsageError)
    assert "cannot write" in str(done.exception)
    assert "missing" not in done.stderr


def test_an_input_is_not_overwritten(tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(GOOD.read_bytes())
    done = run(copy, "--json", copy)
    assert isinstance(done.exception, UsageError)
    assert copy.read_bytes() == GOOD.read_bytes()


def test_json_has_all_and_csv_a_line_for_each_metric(tmp_path):
    target = tmp_path / "all.csv"
    done = run(SHIFTED, "--json", "-", "--csv", target)
    assert done.exit_code == 1
    runs = json.loads(done.stdout)["runs"]
    rows = list(csv.DictReader(io.StringIO(target.read_text())))
    assert len(rows) == sum(len(one["metrics"]) for one in runs)
    shifted = [row for row in rows if row["run"].endswith(":4")]
    assert {row["findings"] for row in shifted} == {"wrong:column_shift"}
    p99 = next(row for row in shifted if (row["metric"], row["statistic"]) == ("itl", "p99"))
    assert (float(p99["value"]), p99["unit"], p99["scope"]) == (112.5012396, "ms", "request")
    output = next(row for row in rows if row["tokens"] == "output")
    assert (output["unit"], output["scope"]) == ("tok/s", "node")


def test_files_from_elsewhere_keep_their_whole_names(tmp_path, monkeypatch):
    monkeypatch.chdir(DATA)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(GOOD.read_bytes())
    done = run(GOOD.name, copy)
    assert GOOD.name in done.stdout
    assert str(copy) in done.stdout


@pytest.mark.parametrize("path", examples(), ids=lambda path: path.name)
def test_spoilt_files_give_one_line_or_a_finding(path, tmp_path):
    for mutation in list(mutations(path))[::25]:
        target = tmp_path / f"spoilt{mutation.suffix}"
        target.write_bytes(mutation.data)
        done = run(target)
        assert done.exit_code in (0, 1, 2), (mutation.name, done.exception)
        assert done.exception is None or isinstance(done.exception, SystemExit), mutation.name
        assert done.stderr.count("\n") == (1 if done.exit_code == 2 else 0), mutation.name
        if done.exit_code == 1:
            assert "\nwrong:\n" in done.stdout


def test_reading_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from harness.serving import load; load(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(GOOD)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_what_has_no_column_is_shown_with_its_bound():
    def metrics(**of):
        return {"metrics": (Metric(**of),), "client": "test", "source": "made"}

    speedup = ServingRun(id="a", **metrics(name="speedup", value=17, unit="1", statistic="max"))
    latency = ServingRun(id="b", **metrics(name="tpot", value=28.76, unit="ms", statistic="median"))
    unsaid = ServingRun(id="c", **metrics(name="throughput", value=12.8, unit="tok/s", tokens="unknown"))
    text = as_text([speedup, latency, unsaid], files=1, unread=0)
    assert "speedup up to 17" in text
    assert "28.76 median" in text
    assert "12.8 of ? / ?" in text
