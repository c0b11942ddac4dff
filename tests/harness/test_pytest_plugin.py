"""The fixture `kernel_benchmark` in a real pytest session, from a user's own file elsewhere."""

import functools
import json
import subprocess
import sys

import pytest

from harness.paths import ROOT

pytestmark = pytest.mark.slow

MINE = """
import pytest
import torch
from kernels.op import implementation

CASE = "batch=2 ctx=5..20 heads=4 page=16"

def attend(o, out):
    kv = o.kv.flatten(0, 1)
    for i, length in enumerate(o.host_lengths):
        tokens = kv[o.token_slots(i)].float()
        weights = torch.softmax(o.q[i].float() @ tokens.T * o.scale, -1)
        out[i] = (weights @ tokens[:, :512]).to(out.dtype)

def half(o, out):
    attend(o, out)
    out[-1] = 0

CALLS = []

def fades(o, out):  # right when it is checked first, and wrong when it was timed
    CALLS.append(1)
    return attend(o, out) if len(CALLS) < 7 else half(o, out)

def raises(o, out):
    raise RuntimeError("no such luck")

@implementation("mine.prepared", op="mla_decode", requires="torch")
def prepared(o, out):
    return lambda: attend(o, out)

GROUPED = pytest.param("torch.sdpa", marks=pytest.mark.benchmark(group="mine"))

KERNELS = [attend, GROUPED, prepared, half, fades, raises, "flashmla", "torch.sdp", 7]

@pytest.mark.parametrize("kernel", KERNELS)
def test_mine(kernel_benchmark, kernel):
    facts = kernel_benchmark("mla_decode", kernel, case=CASE, cache="warm", rounds=5)
    assert facts["check"]["ok"]

def test_two_cases(kernel_benchmark):
    kernel_benchmark("mla_decode", half, case="batch=1,2 ctx=5")
"""


def session(cli, folder, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "harness.pytest_plugin", "-p", "no:cacheprovider"]
    # Where it is told of xdist, pytest-benchmark measures nothing.
    variables = cli.environment(PYTHONPATH=ROOT).items()
    variables = {name: value for name, value in variables if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=folder, env=variables,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


def test_stats_are_of_calls_what_is_wrong_fails_and_what_cannot_run_is_skipped(cli, tmp_path):
    (tmp_path / "test_mine.py").write_text(MINE)
    done = session(cli, tmp_path, "test_mine.py", "-rsf", "--benchmark-json=out.json")
    assert done.returncode == 1
    for said in (
        "yours.half is wrong: ",
        "rows are off",
        "yours.fades is wrong: ",
        "in raises: RuntimeError: no such luck",
        "unknown implementation 'torch.sdp' of mla_decode",
        "7 is no kernel: give a function of (operands, out), or a name",
        "names 2 cases; a benchmark is of one",
    ):
        assert said in done.stdout
    assert "3 passed, 1 skipped" in done.stdout.replace("6 failed, ", ""), "FlashMLA needs a GPU"
    mine, suites, declared = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert declared["extra_info"]["implementation"] == "mine.prepared"
    assert (mine["stats"]["rounds"], mine["extra_info"]["implementation"]) == (5, "yours.attend")
    facts = suites["extra_info"]
    assert (facts["implementation"], facts["check"]["ok"], facts["cache"]) == ("torch.sdpa", True, "warm")
    assert facts["case"].startswith("batch=2 ctx=5..20")
    assert facts["device"] and facts["tflops"] > 0 and facts["kernels"]
    assert (mine["group"], suites["group"]) == (f"mla_decode {facts['case']} core", "mine")
    assert all("DeviceClock" in of["options"]["timer"] for of in (mine, suites)), "whatever a marker says"


def test_without_benchmarks_it_is_a_test_of_the_kernel_where_and_how_options_say(cli, tmp_path):
    (tmp_path / "test_mine.py").write_text(MINE)
    mine = functools.partial(session, cli, tmp_path, "test_mine.py::test_mine[attend]", "--benchmark-disable")
    done = mine()
    assert done.returncode == 0, done.stdout
    assert "--launch graph needs a GPU" in mine("--kernel-device", "cpu", "--kernel-launch", "graph").stdout
    for unasked in (("--kernel-op", "fused_moe"), ("--kernel-impl", "torch.*,mine.*")):
        assert "1 skipped" in mine(*unasked, "-rs").stdout, "what is not asked for is not measured"
    lost = mine("--kernel-device", "cuda:77").stdout
    assert "no device 'cuda:77'" in lost and "UsageError" not in lost, "in a line"


def test_the_suites_own_kernels_as_benchmarks(cli):
    words = ("-q", "--benchmark-only", "tests/harness/test_kernel_benchmarks.py")
    chosen = ("--kernel-op", "mha_prefill", "--kernel-impl", "torch.sdpa", "--kernel-case", "batch=1 new=5")
    done = session(cli, ROOT, *words, *chosen, "--kernel-cache", "warm")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert done.stdout.count("benchmark 'mha_prefill batch=1 new=5") == 1, "grouped by case"
