"""The program that proves the engine on a machine: it runs to its end, and its page is of its runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.results.read import load
from tools import prove_engine


def test_what_is_taken_up_again_is_on_the_same_device(tmp_path, monkeypatch):
    commands = []

    def noted(command: list[str], **how: object) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(prove_engine.subprocess, "run", noted)
    prove_engine.pairs(tmp_path, prove_engine.AGAIN, 1, "3s", "cuda:1")
    (tmp_path / "run.json").touch()
    prove_engine.pairs(tmp_path, prove_engine.AGAIN, 1, "3s", "cuda:1")
    for command, how in zip(commands, ("--out", "--resume"), strict=True):
        assert how in command
        assert command[command.index("--device") + 1] == "cuda:1"


@pytest.mark.slow
def test_its_page_is_of_its_runs(cli, tmp_path):
    out = tmp_path / "engine"
    command = [sys.executable, "-m", "tools.prove_engine", "--out", str(out)]
    command += ["--pairs", "1", "--handicapped", "1", "--per-case", "3s"]
    done = subprocess.run(command, cwd=cli.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (out / "README.md").read_text()
    assert page == done.stdout.removesuffix("\n")
    frame = load(out)
    assert set(frame["run"]) == {"cache-serving", "cache-cold", "cache-warm", "handicapped", "equal"}
    assert set(frame["status"]) == {"ok"}
    for heading in ("Equal pairs", "2 % slower", "Cache modes"):
        assert f"## {heading}" in page
    assert page.count(": 1 cases, 1 verdicts.") == 2
    copies = {row.cache: row.rotation["copies"] for row in frame.itertuples() if row.run.startswith("cache")}
    assert copies["warm"] == 1
    assert copies["serving"] > 1
    assert copies["cold"] > 1
