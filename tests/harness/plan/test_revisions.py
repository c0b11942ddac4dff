"""`compare --revisions`: the kernels of two commits in the same rounds, of a history that is made here. What
is found of known times is tested in ../results/test_compare.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT
from harness.results.journal import Journal

pytestmark = pytest.mark.slow

ADDED = """

class Steady(NaiveMlaDecode):
    name = "torch.steady"
"""
CHANGED = """

class Changed(NaiveMlaDecode):
    name = "torch.changed"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        prepared.picked = lambda: "COMMIT"
        return prepared
"""
MOVED = "kernels/mla_decode/providers/torch_eager.py"
"""Until a commit of 2026-11 implementations lay beside their op's own modules."""
TINY = (
    *("--op", "mla_decode", "--device", "cpu", "--threads", "1", "--cache", "warm"),
    *("--case", "batch=1 ctx=5", "--budget", "5m", "--per-case", "1s"),
)


def git(*words: object) -> str:
    command = ["git", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Two commits beyond ours: in the second torch.changed is another, and torch.steady is added."""
    folder = tmp_path_factory.mktemp("clone") / "suite"
    git("clone", "-q", "--shared", ROOT, folder)
    source = (folder / MOVED).read_text()
    for commit, added in (("first", ""), ("second", ADDED)):
        (folder / MOVED).write_text(source + CHANGED.replace("COMMIT", commit) + added)
        git("-C", folder, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qam", commit)
    return folder


@pytest.fixture
def compare(clone, cli, tmp_path):
    """Cells by implementation and revision, and all records."""

    def of(one: str, other: str, impl: str):
        command = [sys.executable, "-m", "harness", "compare", "--revisions", one, other, *TINY]
        done = subprocess.run(
            [*command, "--impl", impl, "--out", str(tmp_path / "run")], cwd=clone, env=cli.environment(),
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: one was slower, or seemed so
        (records,) = Journal(tmp_path / "run").finished().values()
        return {(c.impl, c.arm.split(" ")[0]): c for c in records if c.kind == "cell"}, records

    return of


def test_each_revision_runs_its_own_kernels_and_what_it_lacks_costs_only_that(compare):
    cells, records = compare("HEAD~1", "HEAD", "torch.changed,torch.steady")
    missing = cells.pop(("torch.steady", "HEAD~1"))
    said = "there is no torch.steady in this arm's source tree"
    assert (missing.status, missing.reason) == ("unsupported", said)
    assert {cell.status for cell in cells.values()} == {"ok"}
    changed = [cells["torch.changed", arm] for arm in ("HEAD~1", "HEAD")]
    assert [cell.picked for cell in changed] == ["first", "second"]
    assert changed[0].source != changed[1].source
    held = [(v.a, v.b) for v in records if v.kind == "verdict" and v.about == "baseline"]
    assert any(
        a.startswith("torch.changed @ HEAD ") and b.startswith("torch.changed @ HEAD~1") for a, b in held
    ), held


def test_a_commit_before_its_files_were_moved(compare, clone):
    before = git("-C", clone, "log", "-1", "--diff-filter=A", "--format=%H^", "--", MOVED)
    cells, _ = compare(before, "HEAD~2", "torch.naive")
    assert len(cells) == 2 and {cell.status for cell in cells.values()} == {"ok"}
