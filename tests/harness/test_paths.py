"""The folder of the cache, with and without a home folder; records name no folder of a machine."""

import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest

from harness.paths import ROOT, cache, command, portable, this_python
from harness.workers.environment import worker_environment

FOLDER = re.compile(r"(?<![\w.~])/(root|home|work|tmp|Users|mnt|data|scratch)/")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder named read-only cannot be written. (Root can write to every real folder.)"""
    (tmp_path / "read-only").mkdir()
    may = os.W_OK | os.X_OK
    monkeypatch.setattr(os, "access", lambda path, mode: mode == may and "read-only" not in str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / f"tmp/deepseek-kernel-bench-{os.getuid()}"


@pytest.mark.parametrize(("xdg", "home", "wanted"), [
    *((xdg, "home", "home/.cache/deepseek-kernel-bench") for xdg in (None, "", "read-only")),
    *(("xdg", home, "xdg/deepseek-kernel-bench") for home in ("read-only", "~")),
    # `~`: HOME is not set, and the system does not know the user
    *((xdg, home, "") for xdg, home in (("read-only", "read-only"), (None, "read-only"), (None, "~"))),
])  # fmt: skip
def test_the_cache_is_in_the_first_place_that_can_be_written(
    tmp_path, temporary, monkeypatch, xdg, home, wanted
):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg and str(tmp_path / xdg))
    monkeypatch.setenv("HOME", home if home == "~" else str(tmp_path / home))
    assert cache() == (tmp_path / wanted if wanted else temporary)


def test_workers_have_a_home_that_can_be_written(tmp_path, temporary, monkeypatch):
    """Libraries compile into it, and packages in the user's own home are still found."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert worker_environment({})["HOME"] == str(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "read-only"))
    environment = worker_environment({})
    assert Path(environment["HOME"]) == temporary / "home"
    assert Path(environment["HOME"]).is_dir()
    assert environment["PYTHONUSERBASE"]


@pytest.mark.parametrize(("text", "recorded"), [
    (f"{ROOT}/tools/mine.py:/home/someone/more/other.py", "tools/mine.py:other.py"),
    (f"{ROOT}", ROOT.name),
    ("--out=/tmp/rt/two", "--out=two"),
    ("/tmp/rt/two/", "two/"),
    ("/scratch", "scratch"),
    *(
        (kept, kept)
        for kept in (
            "http://127.0.0.1:8000/v1/models",
            "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4",
            "results/local/run ../there a/b ~/c /",
            "batch=1,16 ctx=1024..4096 routing=zipf:0.8",
        )
    ),
])  # fmt: skip
def test_a_recorded_text_keeps_names_alone(text, recorded):
    assert portable(text) == recorded


def test_committed_results_name_no_folder_of_a_machine():
    """Quotations from documents are left as they are."""
    listed = subprocess.run(
        ["git", "ls-files", "results", ":!results/published"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    files = [ROOT / name for name in listed.stdout.splitlines() if not name.endswith(".zip")]
    if listed.returncode:
        pytest.skip("no checkout of git's")
    assert files and not [str(file) for file in files if FOLDER.search(file.read_text(encoding="utf-8"))]


def test_a_command_is_one_line_to_paste_with_the_python_that_runs(tmp_path, monkeypatch):
    (here := tmp_path / "main sp ace").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("harness.paths.this_python", this_python)  # instead of tests/conftest.py's
    for python, named in (
        (here / ".venv/bin/python", ".venv/bin/python"),
        ("/opt/a b/python3", "/opt/a b/python3"),
        (here / "python3", "./python3"),  # else a shell would look it up in PATH
    ):
        monkeypatch.setattr("sys.executable", str(python))
        line = command("run", "--resume", here / "results/it's", "--case", "batch=1,2 ctx=4")
        words = [named, "-m", "harness", "run", "--resume", "results/it's", "--case", "batch=1,2 ctx=4"]
        assert shlex.split(line) == words
    assert command("report", tmp_path / "run").endswith(f"report {tmp_path}/run")
