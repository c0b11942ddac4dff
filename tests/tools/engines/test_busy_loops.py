"""Busy loops end with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.paths import ROOT
from tools.engines.busy_loops import busy_loops
from tools.engines.others import Moment


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_there_is_one_on_each_cpu_until_the_end():
    with pytest.raises(KeyboardInterrupt), busy_loops() as loops:
        assert len(loops) == len(os.sched_getaffinity(0))
        assert all(map(runs, loops))
        raise KeyboardInterrupt
    assert not any(map(runs, loops))


def test_they_end_when_their_parent_is_killed():
    code = (
        "import time\nfrom tools.engines.busy_loops import busy_loops\n"
        "with busy_loops() as loops:\n    print(*loops, flush=True)\n    time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    loops = [int(pid) for pid in parent.stdout.readline().split()]
    assert loops
    assert all(map(runs, loops))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    until = time.monotonic() + 120
    while any(map(runs, loops)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(runs, loops))


def test_others_are_what_is_not_ours():
    before = Moment(at=10.0, busy=100.0, ours=20.0)
    assert before.others_until(Moment(at=14.0, busy=108.0, ours=22.0)) == 1.5
    assert before.others_until(Moment(at=14.0, busy=103.98, ours=24.0)) == 0.0
