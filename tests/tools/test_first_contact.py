"""tools/first_contact.sh: a user's mistake gives one line and leaves no files."""

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
