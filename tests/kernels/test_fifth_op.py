"""A fifth op, RMSNorm, in a folder of its own: listed, run, checked, and left alone by serving."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT
from harness.results.journal import Journal
from tests.support.command_line import error_line, undisturbed

pytest.importorskip("torch")


FILES = {
    "__init__.py": """
from kernels.rmsnorm.problem import RmsNorm

OP = RmsNorm()
""",
    "cases.py": """
from shapes.case import Case


def smoke():
    return [Case("rmsnorm", {"tokens": 5, "hidden": 200}, place="smoke")]
""",
    "problem.py": '''
"""RMSNorm: out[t] = x[t] / sqrt(mean(x[t]^2) + 1e-6) * weight, all bf16."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.op import Op, Reference, Tolerance, Work
from kernels.operands import Operands

EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    tokens: int
    hidden: int


@dataclass
class RmsNormOperands(Operands):
    x: torch.Tensor
    weight: torch.Tensor
    sizes: Sizes
    boundary: str = "core"

    live: ClassVar = ("x",)
    streamed: ClassVar = ("weight",)


class RmsNorm(Op):
    name = "rmsnorm"
    Sizes = Sizes
    baseline = dict.fromkeys(("cpu", "cuda", "rocm"), "torch.naive")

    def operands(self, sizes, seeds, device, boundary="core"):
        generator = torch.Generator(device).manual_seed(seeds.stationary)
        weight = torch.randn(sizes.hidden, generator=generator, device=device).bfloat16()
        generator.manual_seed(1_000_003 * seeds.stationary + seeds.live)
        x = torch.randn(sizes.tokens, sizes.hidden, generator=generator, device=device).bfloat16()
        return RmsNormOperands(x, weight, sizes)

    def empty_operands(self, sizes, device):
        x, weight = ((sizes.tokens, sizes.hidden), (sizes.hidden,))
        empty = (torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in (x, weight))
        return RmsNormOperands(*empty, sizes)

    def empty_output(self, sizes, device):
        return torch.empty(sizes.tokens, sizes.hidden, dtype=torch.bfloat16, device=device)

    def reference(self, operands, max_flops=float("inf"), offset=0.0):
        x = operands.x.double()
        value = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * operands.weight.double()
        return Reference(value, value.abs() * 2.0**-9)

    def tolerance(self, sizes):
        return Tolerance(row=2.0, element=10.0)

    def work(self, sizes, boundary="core"):
        return Work(4.0 * sizes.tokens * sizes.hidden, 2.0 * self.operand_bytes(sizes))

    def operand_bytes(self, sizes):
        return 2 * sizes.hidden * (sizes.tokens + 1)

    def output_bytes(self, sizes):
        return 2 * sizes.tokens * sizes.hidden

    def streamed_bytes(self, sizes, turns=1):
        return 2 * turns * sizes.hidden
''',
    "providers/__init__.py": "",
    "providers/torch_eager.py": """
from kernels.op import Implementation, Prepared
from kernels.rmsnorm.problem import EPS


class _Naive(Prepared):
    def call(self):
        x = self.operands.x.float()
        scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        self.out.copy_(x * scale * self.operands.weight.float())


class Naive(Implementation):
    name = "torch.naive"
    requires = "torch"

    def available(self, platform):
        return platform.library("torch")

    def prepare(self, operands, out):
        return _Naive(operands, out)

""",
}


@pytest.fixture
def rmsnorm(tmp_path: Path) -> Path:
    folder = tmp_path / "rmsnorm"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


IN_ONE_PROCESS = """
import sys
from tests.support.workers_here import run_here
print(run_here("ops", "--json", "-", command="list").stdout)
print(run_here(*sys.argv[1:]), file=sys.stderr)
"""
"""With its workers: the op must be there when `kernels` is imported, so that it cannot be this process."""


def test_it_is_listed_run_and_checked(cli, rmsnorm: Path, tmp_path: Path):
    options = ("--op", "rmsnorm", "--device", "cpu", "--threads", "1", "--cache", "warm", "--budget", "1s")
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, *options, "--out", tmp_path / "run"],
        env=cli.environment(KERNEL_BENCH_PLUGINS=rmsnorm),
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    rows = json.loads(done.stdout)
    assert {row["op"]: row["sizes"] for row in rows}["rmsnorm"] == "tokens, hidden" and len(rows) == 5
    (records,) = Journal(tmp_path / "run").finished().values()
    status = {r.impl: (r.status, undisturbed(r.reason)) for r in records if r.kind == "cell"}
    assert status == {"torch.naive": ("ok", "")}, (done.stdout, done.stderr)


@pytest.mark.parametrize(("name", "text", "command", "wanted"), [
    ("rmsnorm", None, ("list",), "which is not a Python file or package"),
    ("rmsnorm", "OPS = 1", ("list",), "has no attribute 'OP'"),
    ("rmsnorm", "import nothing", ("run", "--op", "rmsnorm", "--device", "cpu"), "No module named 'nothing'"),
    ("mla_decode", "", ("list",), "kernels/ has a mla_decode already"),
])  # fmt: skip
def test_a_folder_that_is_no_op_is_one_line(cli, tmp_path: Path, name, text, command, wanted):
    (tmp_path / name).mkdir()
    if text is not None:
        (tmp_path / name / "__init__.py").write_text(text)
    assert wanted in error_line(cli(*command, KERNEL_BENCH_PLUGINS=tmp_path / name))
