"""Runs of a pair at the same time, their engines in turn: whose time counts when, and what may fail."""

import os
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from harness.errors import UsageError
from harness.paths import ROOT
from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.ab.steps import steps
from harness.serving.live.client.request_times import TimedRequest, request_times
from harness.serving.live.engine.time_slices import OwnClock, TimeSlices, require_cpu
from kernels.platform import Platform
from tests.support.serving_processes import MARK, comes, gone, marked

DOUBLES = ROOT / "tests" / "doubles"


# --- an engine's own clock ---


def test_it_stands_still_with_its_engine():
    clock = OwnClock(((10.0, 12.0), (20.0, 25.0)))
    assert [clock(at) for at in (5, 10, 11, 12, 13, 22, 30)] == [5, 10, 10, 10, 11, 18, 23]
    assert OwnClock()(7.25) == 7.25


# --- turns ---


class Puppet:
    """An engine that notes when it is awake."""

    def __init__(self, name):
        self.name, self.awake, self.changes = name, True, []

    def pause(self):
        return self._turn(False)

    def resume(self):
        return self._turn(True)

    def _turn(self, awake):
        at = time.monotonic()
        if awake != self.awake:
            self.changes.append((at, awake))
        self.awake = awake
        return at


def test_one_is_awake_at_a_time_and_all_are_at_the_end():
    a, b, c = engines = [Puppet(name) for name in "abc"]
    with TimeSlices(engines, 0.005) as slices:
        while len(a.changes) < 9:
            time.sleep(0.005)
    assert a.awake and b.awake and c.awake
    last = min(engine.changes[-1][0] for engine in engines)  # all are woken when it ends
    spans = []
    for engine in engines:
        stops = slices.clock(engine).stops
        assert all(start < end <= following for (start, end), (following, _) in pairwise(stops))
        assert len(stops) >= 3
        spans += [(end, start) for (_, end), (start, _) in pairwise(stops) if start < last]
    # Awake spans of different engines do not meet.
    assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))


def test_a_gpu_is_not_stopped_with_its_process():
    require_cpu(Platform("cpu", "x86-avx512"))
    with pytest.raises(UsageError, match="slices need engines on the CPU, this is cuda sm_90"):
        require_cpu(Platform("cuda", "sm_90"))


def test_steps_after_the_first_run_was_over_are_not_steady():
    request = TimedRequest(0.0, tuple(1.0 + 0.1 * i for i in range(50)))
    assert steps([request], 1).steady == 47
    assert steps([request], 1, until=3.05).steady == 18


# --- pairs of runs ---


CLIENT = "fake_client.py {url} {result} {seed} {concurrency} {output_len} dated"


def command(model, out, *more):
    return [
        *(sys.executable, "-m", "harness", "serving", "run", "--model", str(model), "--out", str(out)),
        *("--engine", f"{sys.executable} {DOUBLES}/fake_engine.py ok {{port}} {{name}}"),
        *("--client", f"{sys.executable} {DOUBLES}/{CLIENT}", "--arm", "a", "--arm", "b:X=1"),
        *("--isl", "16", "--osl", "100", "--concurrency", "1", "--prompts", "1", "--keep-disturbed"),
        *("--slice", "0.05", "--pairs", "2", *more),
    ]


def test_both_runs_of_a_pair_share_its_time(model_folder, tmp_path, here):
    out = tmp_path / "out"
    done = here(*command(model_folder, out)[3:])
    assert done.returncode == 0, done.stderr
    runs = LiveJournal(out).of("run")
    assert [(r["pair"], r["arm"], r["status"]) for r in runs] == [
        (0, "a", "ok"),
        (0, "b", "ok"),
        (1, "b", "ok"),
        (1, "a", "ok"),
    ]
    for one, other in (runs[:2], runs[2:]):
        raw = [request_times(out / r["result"]).requests[0] for r in (one, other)]
        together = max(r.tokens[-1] for r in raw) - min(r.sent for r in raw)
        # No moment counts for both, and each wall time is more than its own.
        assert one["duration_s"] + other["duration_s"] <= together
        for record, request in ((one, raw[0]), (other, raw[1])):
            assert record["stood_still"]
            wall = request.tokens[-1] - request.sent
            still = sum(
                min(end, request.tokens[-1]) - max(start, request.sent)
                for start, end in record["stood_still"]
                if start < request.tokens[-1] and end > request.sent
            )
            assert record["duration_s"] == pytest.approx(wall - still, abs=1e-6)
            assert record["steady_itl_ms"] >= 4.0
    plan = LiveJournal(out).lines()[0]
    assert plan["slice_s"] == 0.05 and plan["machine"]["host"] and "environment" in plan


def test_its_end_leaves_nothing(model_folder, tmp_path):
    mark = tmp_path.name
    process = subprocess.Popen(
        command(model_folder, tmp_path / "out", "--pairs", "50"),
        cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, MARK: mark},
    )  # fmt: skip
    assert comes(lambda: list(tmp_path.glob("out/runs/pair-000*")))
    assert len(marked(mark)) > 4
    process.terminate()
    _, text = process.communicate(timeout=120)
    assert "Traceback" not in text
    assert gone(mark)
