"""`compare --revisions`: the kernels of two commits in the same rounds, of a history that is made here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT
from harness.results.journal import Journal

pytestmark = [pytest.mark.slow, pytest.mark.alone]

WAIT = """
def _waiting(call, seconds):
    import time

    def waiting():
        call()
        time.sleep(seconds)  # not held up by who takes the CPU

    return waiting


class Waiting(NaiveMlaDecode):
    name = "torch.waiting"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        prepared.call = _waiting(prepared.call, SECONDS)
        return prepared


class Steady(Waiting):
    name = "torch.steady"

    def prepare(self, operands, out):
        prepared = NaiveMlaDecode.prepare(self, operands, out)
        prepared.call = _waiting(prepared.call, 0.01)
        return prepared
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Two commits: torch.waiting takes 3 % longer in the second, torch.steady is as it was."""
    folder = tmp_path_factory.mktemp("clone") / "suite"
    git("clone", "-q", "--shared", ROOT, folder)
    file = folder / "kernels" / "mla_decode" / "providers" / "torch_eager.py"
    source = file.read_text()
    for seconds in ("0.0100", "0.0103"):
        file.write_text(source + WAIT.replace("SECONDS", seconds))
        git("-C", folder, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qam", f"waits {seconds}")
    return folder


def git(*words: object) -> None:
    subprocess.run(["git", *map(str, words)], check=True, capture_output=True)


def compare(clone: Path, cli, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness", "compare", "--revisions", *map(str, arguments)]
    return subprocess.run(
        command, cwd=clone, env=cli.environment(), capture_output=True, text=True, timeout=900, check=False
    )


TINY = (
    *("--op", "mla_decode", "--device", "cpu", "--threads", "1"),
    *("--cache", "warm", "--case", "batch=1 ctx=5"),
)


def test_a_planted_regression_of_3_percent(clone, cli, tmp_path):
    out = tmp_path / "run"
    done = compare(clone, cli, "HEAD~1", "HEAD", *TINY, "--impl", "torch.waiting,torch.steady",
                   "--budget", "40s", "--out", out)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 regressed:" in done.stdout and "torch.waiting @ HEAD" in done.stdout
    (records,) = Journal(out).finished().values()
    verdicts = {v.a.split(" @")[0]: v for v in records if v.kind == "verdict" and v.about == "baseline"}
    assert verdicts["torch.waiting"].verdict == "slower"
    assert 0.9 < verdicts["torch.waiting"].ratio < 0.99
    assert verdicts["torch.steady"].verdict != "slower"
    sources = {(c.impl, c.arm.split(" ")[0]): c.source for c in records if c.kind == "cell"}
    assert sources["torch.waiting", "HEAD~1"] != sources["torch.waiting", "HEAD"]


def test_what_a_revision_lacks_costs_only_that(clone, cli, tmp_path):
    out = tmp_path / "run"
    done = compare(clone, cli, "HEAD~2", "HEAD", *TINY, "--impl", "torch.steady,torch.naive",
                   "--budget", "6s", "--out", out)  # fmt: skip
    (records,) = Journal(out).finished().values()
    cells = {(c.impl, c.arm.split(" ")[0]): c for c in records if c.kind == "cell"}
    missing = cells["torch.steady", "HEAD~2"]
    assert (missing.status, missing.reason) == (
        "unsupported", "there is no torch.steady in this arm's source tree"
    )  # fmt: skip
    assert cells["torch.naive", "HEAD~2"].status == cells["torch.naive", "HEAD"].status == "ok"
    assert done.returncode in (0, 1)


def test_the_same_commit_is_nothing_to_compare(clone, cli):
    done = compare(clone, cli, "HEAD", "HEAD~0", *TINY)
    assert done.returncode == 2
    assert "are the same commit" in done.stderr


MOVED = "kernels/mla_decode/providers/torch_eager.py"
"""Until a commit of 2026-11 implementations lay beside their op's own modules."""


def test_a_commit_before_its_files_were_moved(clone, cli, tmp_path):
    moved = "log", "-1", "--diff-filter=A", "--format=%H^", "--", MOVED
    before = subprocess.run(["git", "-C", clone, *moved], capture_output=True, text=True, check=True)
    out = tmp_path / "run"
    done = compare(clone, cli, before.stdout.strip(), "HEAD~2", *TINY, "--impl", "torch.naive,torch.sdpa",
                   "--budget", "8s", "--out", out)  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    (records,) = Journal(out).finished().values()
    cells = {(c.impl, c.arm): c.status for c in records if c.kind == "cell"}
    assert len(cells) == 4 and set(cells.values()) == {"ok"}
