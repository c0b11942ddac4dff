"""The Triton of images with torch 2.11, 3.6, compiles and interprets all that the suite ships, as that of
constraints.txt does; `make test-all` fetches it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from harness.catalogue.architectures import architectures
from harness.paths import ROOT
from tests.support.interpreting import found_interpreted

pytestmark = pytest.mark.slow

OTHER, VERSION = ROOT / ".other-triton", "3.6.0"


@pytest.mark.parametrize(("op", "target"), list(zip(kernels.OPS, reversed(architectures()), strict=True)))
def test_what_is_shipped_may_be(op, target, cli, tmp_path: Path):
    """Each op for another architecture than by this environment's own (harness/compile/test_compile.py)."""
    report = tmp_path / "compiles.json"
    done = cli("compile", "--op", op, "--target", target, "--json", report, PYTHONPATH=OTHER)
    assert done.returncode == 0, done.stderr
    read = json.loads(report.read_text())
    assert read["triton"] == VERSION
    assert all(row["ok"] for row in read["compiles"])
    assert {(row["op"], row["target"]) for row in read["compiles"]} == {(op, target)}


@pytest.mark.parametrize("op", kernels.OPS)
def test_what_is_interpreted_is_right(op, monkeypatch):
    """The first cases of the op's own tests."""
    monkeypatch.setenv("PYTHONPATH", str(OTHER))
    code = "import triton, sys; print(triton.__version__, file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == VERSION
    reasons = found_interpreted(str(ROOT / "tests" / "kernels" / op / "test_triton.py"), "few")
    assert len(reasons) == 2 and not any(map(any, reasons)), reasons
