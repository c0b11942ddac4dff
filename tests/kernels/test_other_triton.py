"""Two versions of Triton are in use. The one that this environment does not have compiles and interprets all
that the suite ships; `make test-all` fetches it (tools/other_triton.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import other_triton
import pytest
import set_up

import kernels
from harness.catalogue.architectures import architectures
from harness.paths import ROOT
from tests.support.interpreting import found_interpreted

pytest.importorskip("torch")
triton = pytest.importorskip("triton")


@pytest.fixture(scope="module")
def version() -> str:
    other = other_triton.other(triton.__version__)
    if not other_triton.folder(other).is_dir():
        pytest.fail(f"Triton {other} is not here: `make other-triton` fetches it")
    return other


@pytest.mark.slow
@pytest.mark.parametrize(("op", "target"), list(zip(kernels.OPS, reversed(architectures()), strict=True)))
def test_what_is_shipped_may_be(op, target, cli, version: str, tmp_path: Path):
    """Each op for another architecture than by this environment's own (harness/compile/test_compile.py)."""
    report = tmp_path / "compiles.json"
    path = other_triton.folder(version)
    done = cli("compile", "--op", op, "--target", target, "--json", report, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    read = json.loads(report.read_text())
    assert read["triton"] == version
    assert all(row["ok"] for row in read["compiles"])
    assert {(row["op"], row["target"]) for row in read["compiles"]} == {(op, target)}


@pytest.mark.slow
@pytest.mark.parametrize("op", kernels.OPS)
def test_what_is_interpreted_is_right(op, version: str, monkeypatch):
    """The first cases of the op's own tests."""
    monkeypatch.setenv("PYTHONPATH", str(other_triton.folder(version)))
    code = "import triton, sys; print(triton.__version__, file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == version
    reasons = found_interpreted(str(ROOT / "tests" / "kernels" / op / "test_triton.py"), "few")
    assert len(reasons) == 2 and not any(map(any, reasons)), reasons


def test_the_other_version_is_the_one_that_is_not_here():
    newer = other_triton.other("3.6.0")
    assert other_triton.other("3.6.1") == newer
    assert other_triton.other(newer) == other_triton.other("3.3.1") == "3.6.0"
    assert f"triton=={newer}" in set_up.read_pins()


def test_what_cannot_be_fetched_is_one_line_and_leaves_nothing(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(other_triton, "ROOT", tmp_path)

    def pip(python, verb, *arguments):
        (tmp_path / ".other-triton" / arguments[2].name).mkdir(parents=True)
        return "", reason

    monkeypatch.setattr(other_triton, "pip", pip)
    reason = "no network"
    with pytest.raises(set_up.SetUpError, match=r"^Triton 3.6.0 cannot be fetched: no network; `make test`"):
        other_triton.fetch("3.6.0")
    assert not other_triton.folder("3.6.0").exists()
    reason = ""
    other_triton.fetch("3.6.0")
    assert other_triton.folder("3.6.0").is_dir()
