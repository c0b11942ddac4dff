"""`serving load`: what no transcript of it shows."""

import subprocess
import sys

from harness.paths import ROOT
from harness.serving.clients.report import as_text
from harness.serving.schema import Metric, OfferedLoad, ServingRun
from tests.support.serving_files import DATA

GOOD = DATA / "sglang_bench_serving_0.5.23.jsonl"


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
