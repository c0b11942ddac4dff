"""Runs of a pair at the same time, their engines in turn: whose time counts when."""

from itertools import pairwise

import pytest

from harness.errors import UsageError
from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.client.request_times import request_times
from harness.serving.live.engine.time_slices import OwnClock, require_cpu
from kernels.platform import Platform
from tests.support.serving_processes import client_command, engine_command


def test_an_engines_own_clock_stands_still_with_it():
    clock = OwnClock(((10.0, 12.0), (20.0, 25.0)))
    assert [clock(at) for at in (5, 10, 11, 12, 13, 22, 30)] == [5, 10, 10, 10, 11, 18, 23]
    with pytest.raises(UsageError, match="slices need engines on the CPU, this is cuda sm_90"):
        require_cpu(Platform("cuda", "sm_90"))


def test_both_runs_of_a_pair_share_its_time(model_folder, tmp_path, here):
    out = tmp_path / "out"
    done = here(
        *("serving", "run", "--model", model_folder, "--out", out, "--engine", engine_command()),
        *("--client", client_command("dated"), "--arm", "a", "--arm", "b:X=1", "--isl", 16, "--osl", 100),
        *("--concurrency", 1, "--prompts", 1, "--keep-disturbed", "--slice", 0.05, "--pairs", 2),
    )
    assert done.returncode == 0, done.stderr
    runs = LiveJournal(out).of("run")
    assert [(r["pair"], r["arm"], r["status"]) for r in runs] == [
        (0, "a", "ok"), (0, "b", "ok"), (1, "b", "ok"), (1, "a", "ok"),
    ]  # fmt: skip
    for pair in (runs[:2], runs[2:]):
        requests = [request_times(out / record["result"]).requests[0] for record in pair]
        together = max(r.tokens[-1] for r in requests) - min(r.sent for r in requests)
        # No moment counts for both.
        assert sum(record["duration_s"] for record in pair) <= together
        for record, request in zip(pair, requests, strict=True):
            stops = record["stood_still"]
            assert stops and all(start < end <= after for (start, end), (after, _) in pairwise(stops))
            clock = OwnClock(tuple(map(tuple, stops)))
            own = clock(request.tokens[-1]) - clock(request.sent)
            assert record["duration_s"] == pytest.approx(own, abs=1e-6)
