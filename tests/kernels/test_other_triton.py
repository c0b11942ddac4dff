"""The Triton of images with torch 2.11, 3.6, compiles and interprets all that the suite ships, as that of
constraints.txt does; `make test-all` fetches it.

The interpreted cases run in one process of their own: this file as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from harness.catalogue.architectures import architectures
from harness.paths import ROOT
from kernels.compose import bind
from kernels.operands import Seeds
from kernels.triton_runtime import INTERPRETER, SuiteTriton
from shapes.case import parse

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.support.judging import judged  # noqa: E402

CASES = [
    ("block_scale_gemm", "m=9 n=300 k=1280", "with_quant"),
    ("fused_moe", "tokens=3 experts=16 topk=4 hidden=256 inter=128 shared=1", "with_routing"),
    ("mla_decode", "batch=3 ctx=1..300 page=16", "core"),
    ("mla_decode", "batch=3 ctx=1..300 kv=fp8", "core"),
    ("mha_prefill", "batch=3 new=1..90 prefix=0..70 heads=2", "core"),
]


OTHER = ROOT / ".other-triton"


@pytest.mark.slow
@pytest.mark.parametrize(("op", "target"), list(zip(kernels.OPS, reversed(architectures()), strict=True)))
def test_what_is_shipped_may_be(op, target, cli, tmp_path: Path):
    """Each op for another architecture than by this environment's own (harness/compile/test_compile.py)."""
    report = tmp_path / "compiles.json"
    done = cli("compile", "--op", op, "--target", target, "--json", report, PYTHONPATH=OTHER)
    assert done.returncode == 0, done.stderr
    read = json.loads(report.read_text())
    assert read["triton"] == "3.6.0"
    assert all(row["ok"] for row in read["compiles"])
    assert {(row["op"], row["target"]) for row in read["compiles"]} == {(op, target)}


@pytest.mark.slow
def test_what_is_interpreted_is_right():
    path = os.pathsep.join(map(str, (OTHER, ROOT)))
    environment = os.environ | INTERPRETER | {"PYTHONPATH": path}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    by, *reports = map(json.loads, done.stdout.splitlines())
    assert by == "3.6.0"
    assert {report["op"] for report in reports} == set(kernels.OPS)
    assert all(report["ok"] for report in reports), reports


def interpret(op_name: str, text: str, boundary: str) -> list[dict]:
    """The judge's report on each of the suite's own that takes the case."""
    op = kernels.OPS[op_name]
    sizes = op.sizes(parse(text)[0])
    reports = []
    for implementation in kernels.implementations(op_name):
        if not isinstance(implementation, SuiteTriton) or not implementation.fits(sizes).ok:
            continue
        operands, out = op.operands(sizes, Seeds(), "cpu", boundary), op.empty_output(sizes, "cpu")
        prepared = bind(op, implementation, operands, out)
        prepared.call()
        report = judged(op, implementation, sizes, operands, prepared.result())
        reports.append({"op": op_name, "implementation": implementation.name, **report})
    return reports


if __name__ == "__main__":
    print(json.dumps(triton.__version__))
    for case in CASES:
        for report in interpret(*case):
            print(json.dumps(report))
