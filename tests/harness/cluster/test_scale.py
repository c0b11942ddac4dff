"""Ten thousand cases on 64 devices, nothing measured: the driver keeps up, and needs little memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

CASES, DEVICES, ROUNDS, IMPLEMENTATIONS = 10_000, 64, 60, 8
SCRIPT = f"""
import json, random, resource, sys, time
from pathlib import Path
from tests.harness.cluster.test_driver import Driven
from tests.support import simulated_pool

draw = random.Random(0)
faults = ["dies", "hangs", "fails"]
pool = simulated_pool.SimulatedPool(
    {{f"device {{i}}": "cpu" for i in range({DEVICES})}},
    lambda device, case: draw.choice(faults) if draw.random() < 0.01 else draw.uniform(10, 60),
    rounds={ROUNDS},
)
names = tuple(f"torch.made_up_{{i}}" for i in range({IMPLEMENTATIONS}))
simulated_pool.made_up_run.__defaults__ = (names,)
began = time.process_time()
driven = Driven(Path(sys.argv[1]), pool, {CASES})
used_s = time.process_time() - began
print(json.dumps({{
    "share": used_s / pool.now,
    "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    "finished": len(driven.shown),
    "once": len(set(driven.shown)),
    "given up": len(driven.driver.dispatcher.given_up),
    "hours": pool.now / 3600,
}}))
"""


@pytest.mark.slow
def test_the_driver_keeps_up(tmp_path):
    """A share of a core by its own CPU time, over the wall-clock that is simulated."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["finished"] == facts["once"] == CASES - facts["given up"]
    assert facts["given up"] < 0.01 * CASES
    assert facts["share"] < 0.2
    assert facts["gigabytes"] < 1.0
    assert facts["hours"] < 1.15 * CASES * 35 / DEVICES / 3600 + 0.1
    print(facts)
