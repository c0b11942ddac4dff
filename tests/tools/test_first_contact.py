"""First contact: a user's mistakes are one line and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.errors import NOTHING_RAN, USAGE
from harness.paths import ROOT


@pytest.mark.parametrize(
    ("arguments", "code", "wanted"),
    [
        ((), USAGE, "are required: out\n"),
        (("out", "gem", "timers"), USAGE, "error: no step gem; steps: timers, "),
        (("out", "gemm", "--within", "soon"), USAGE, "argument --within: invalid float value: 'soon'"),
        (("out",), NOTHING_RAN, "error: no GPU here; this is what only a GPU can tell\n"),
        (("out", "--timers", ""), NOTHING_RAN, "error: no GPU here"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, code, wanted):
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "first_contact.py", *arguments],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    said = done.stderr.rpartition("first_contact.py: ")[2]
    assert wanted in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())
