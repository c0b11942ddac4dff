"""`compare --revisions`: the kernels of two commits in the same rounds, of a history that is made here. What
is found of known times is tested in ../results/test_compare.py."""

import subprocess
from pathlib import Path

import pytest

from harness.paths import ROOT
from harness.results.journal import Journal

pytestmark = pytest.mark.slow

ADDED = """

class Steady(naive):
    name = "torch.steady"
"""
CHANGED = """

class Changed(naive):
    name = "torch.changed"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        prepared.picked = lambda: "COMMIT"
        return prepared
"""
OLD, MOVED = "kernels/mla_decode/torch_eager.py", "kernels/mla_decode/providers/torch_eager.py"
"""Until a commit of 2026-11 rows lay beside their op's own modules, in classes without its name."""
TINY = (
    *("--op", "mla_decode", "--device", "cpu", "--threads", "1", "--cache", "warm"),
    *("--case", "batch=1 ctx=5", "--budget", "5m", "--per-case", "1s"),
)


def git(*words: object) -> str:
    command = ["git", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path) -> Path:
    """Two commits: before files were moved; beyond ours, with another torch.changed and a torch.steady."""
    folder = tmp_path / "suite"
    git("clone", "-q", "--shared", ROOT, folder)
    before = git("-C", folder, "log", "-1", "--diff-filter=A", "--format=%H^", "--", MOVED)
    own = CHANGED.replace("(naive)", "(Naive)"), CHANGED + ADDED
    for name, at, file, added in (("first", before, OLD, own[0]), ("second", "HEAD", MOVED, own[1])):
        git("-C", folder, "checkout", "-q", "-b", name, git("-C", ROOT, "rev-parse", at))
        with (folder / file).open("a") as source:
            source.write(added.replace("COMMIT", name))
        git("-C", folder, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qam", name)
    return folder


def test_each_revision_runs_its_own_kernels_and_what_it_lacks_costs_only_that(clone, cli, tmp_path):
    words = (*TINY, "--impl", "torch.changed,torch.steady", "--out", tmp_path / "run")
    done = subprocess.run(
        cli.command("compare", "--revisions", "first", "second", *words), cwd=clone, env=cli.environment(),
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: one was slower, or seemed so
    (records,) = Journal(tmp_path / "run").finished().values()
    cells = {(c.impl, c.setting.split(" ")[0]): c for c in records if c.kind == "cell"}
    missing = cells.pop(("torch.steady", "first"))
    said = "there is no torch.steady in this setting's source tree"
    assert (missing.status, missing.reason) == ("unsupported", said)
    assert {cell.status for cell in cells.values()} == {"ok"}
    changed = [cells["torch.changed", setting] for setting in ("first", "second")]
    assert [cell.picked for cell in changed] == ["first", "second"]
    assert changed[0].source != changed[1].source
    held = [(v.a, v.b) for v in records if v.kind == "verdict" and v.about == "baseline"]
    assert any(
        a.startswith("torch.changed @ second ") and b.startswith("torch.changed @ first ") for a, b in held
    ), held
