"""What is recorded names no folder of the machine."""

from __future__ import annotations

import re
import subprocess

import pytest

from harness.paths import ROOT, portable

FOLDER = re.compile(r"(?<![\w.~])/(root|home|work|tmp|Users|mnt|data|scratch)/")


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        (f"{ROOT}/tools/mine.py:/home/someone/more/other.py", "tools/mine.py:other.py"),
        (f"{ROOT}", ROOT.name),
        ("--out=/tmp/rt/two", "--out=two"),
        ("/tmp/rt/two/", "two/"),
        ("/scratch", "scratch"),
        ("http://127.0.0.1:8000/v1/models", "http://127.0.0.1:8000/v1/models"),
        ("/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4", "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4"),
        ("results/local/run ../there a/b ~/c /", "results/local/run ../there a/b ~/c /"),
        ("batch=1,16 ctx=1024..4096 routing=zipf:0.8", "batch=1,16 ctx=1024..4096 routing=zipf:0.8"),
    ],
)
def test_a_recorded_text_keeps_names_alone(text, recorded):
    assert portable(text) == recorded


def test_committed_results_name_no_folder_of_a_machine():
    """Documents of others are quoted as they are."""
    listed = subprocess.run(
        ["git", "ls-files", "results", ":!results/published"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    files = [ROOT / name for name in listed.stdout.splitlines() if not name.endswith(".zip")]
    if listed.returncode:
        pytest.skip("no checkout of git's")
    assert files and not [str(file) for file in files if FOLDER.search(file.read_text(encoding="utf-8"))]
