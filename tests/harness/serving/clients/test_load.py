"""`serving load`: what is printed, what is written, and its exit codes."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from harness.cli import cli
from harness.paths import ROOT
from harness.serving import load
from harness.serving.clients.report import as_text
from harness.serving.schema import Metric, OfferedLoad, ServingRun
from tests.support.serving_files import DATA, FILES

GOOD = DATA / "sglang_bench_serving_0.5.23.jsonl"
SHIFTED = DATA / "dstack_online.csv"


def run(*arguments: object):
    return CliRunner().invoke(cli, ["serving", "load", *map(str, arguments)])


def test_every_run_of_every_client_shows_a_number():
    lines = run(*FILES).stdout.splitlines()
    for one in (one for path in FILES for one in load(path)):
        row = next(line for line in lines if line.startswith(Path(one.id).name))
        numbers = [cell for cell in row.split()[1:] if cell.lstrip("-").replace(".", "").isdigit()]
        assert numbers or not one.metrics, row  # a configuration has none


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


def test_reading_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from harness.serving import load; load(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(GOOD)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_what_has_no_column_is_shown_with_its_bound():
    for said, metric in {
        "speedup up to 17": Metric(name="speedup", value=17, unit="1", statistic="max"),
        "28.76 median": Metric(name="tpot", value=28.76, unit="ms", statistic="median"),
        "12.8 of ? / ?": Metric(name="throughput", value=12.8, unit="tok/s", tokens="unknown"),
    }.items():
        run = ServingRun(id="made", client="test", source="made", metrics=(metric,))
        assert said in as_text([run], files=1, unread=0)
    longest = OfferedLoad(longest_input_len=1024, longest_output_len=512)
    assert "<=1024/<=512" in as_text([run.model_copy(update={"workload": longest})], files=1, unread=0)
