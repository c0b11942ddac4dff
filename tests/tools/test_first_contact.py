"""tools/first_contact.sh: a user's mistake gives one line and leaves no files; steps may be called again."""

import os
import subprocess
import sys

import pytest

from harness.errors import NOTHING_RAN, USAGE
from harness.paths import ROOT


@pytest.mark.parametrize(("arguments", "code", "wanted"), [
    ((), USAGE, ""),
    (("out", "gem", "pairs"), USAGE, "error: no step gem; steps: mla-small pairs "),
    (("out",), NOTHING_RAN, "error: no GPU here: this is what only a GPU can tell\n"),
])  # fmt: skip
def test_a_mistake_is_one_line(tmp_path, arguments, code, wanted):
    done = subprocess.run(
        [ROOT / "tools" / "first_contact.sh", *arguments],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (code, int(bool(wanted))), done.stderr
    assert wanted in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_step_is_made_again_and_one_without_time_is_named(tmp_path):
    """A run refuses a folder that holds one."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" = harness ] || exit 0\nfor out; do :; done\nmkdir "$out"\n')
    python.chmod(0o755)
    said = [
        subprocess.run(
            [ROOT / "tools" / "first_contact.sh", tmp_path / "out", "pairs"],
            env=os.environ | {"PYTHON": str(python), "WITHIN": within},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for within in ("540", "540", "14")
    ]
    assert [line.partition("pairs: ")[2].split(", ")[-1] for line in said] == [
        "exit code 0\n",
        "exit code 0\n",
        "no time\n",
    ]
