"""The fixture `kernel_benchmark` in real pytest sessions, from a user's own file elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.alone]

MINE = """
import time
import torch

CASE = "batch=2 ctx=5..20 heads=4 page=16"

def attend(o, out):
    kv = o.kv.flatten(0, 1)
    for i, length in enumerate(o.host_lengths):
        tokens = kv[o.token_slots(i)].float()
        weights = torch.softmax(o.q[i].float() @ tokens.T * o.scale, -1)
        out[i] = (weights @ tokens[:, :512]).to(out.dtype)

def slow(o, out):
    attend(o, out)
    time.sleep(0.02)

def half(o, out):
    attend(o, out)
    out[-1] = 0

def raises(o, out):
    raise RuntimeError("no such luck")

def test_mine(kernel_benchmark):
    kernel_benchmark("mla_decode", attend, case=CASE, cache="warm", rounds=5)

def test_slow(kernel_benchmark):
    facts = kernel_benchmark("mla_decode", slow, case=CASE, cache="warm", rounds=5)
    assert facts["check"]["ok"] and facts["tflops"] > 0 and facts["gbps"] > 0

def test_the_suites(kernel_benchmark):
    kernel_benchmark("mla_decode", "torch.sdpa", case=CASE, cache="warm", rounds=5)
"""

WRONG = """
import pytest
from test_mine import CASE, half, raises

@pytest.mark.parametrize("kernel", [half, raises, "flashmla", "torch.sdp", 7])
def test_what_does_not_pass(kernel_benchmark, kernel):
    kernel_benchmark("mla_decode", kernel, case=CASE, cache="warm", rounds=2)

def test_two_cases(kernel_benchmark):
    kernel_benchmark("mla_decode", half, case="batch=1,2 ctx=5")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("user")
    (path / "test_mine.py").write_text(MINE)
    (path / "test_wrong.py").write_text(WRONG)
    return path


@pytest.fixture(scope="module")
def session(cli, folder):
    """A pytest session of the user's."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "harness.pytest_plugin", "-p", "no:cacheprovider"]
        return subprocess.run(
            [*command, *map(str, arguments)],
            cwd=folder,
            env=cli.environment(PYTHONPATH=ROOT),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def saved(session, folder):
    done = session("test_mine.py", "--benchmark-only", "--benchmark-save=one", "--benchmark-json=out.json")
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "out.json").read_text())


def test_stats_are_seconds_of_a_call_with_what_stands_beside_them(saved):
    found = {each["name"]: each for each in saved["benchmarks"]}
    assert found["test_slow"]["stats"]["min"] > 0.02
    assert found["test_mine"]["stats"]["median"] < found["test_slow"]["stats"]["median"]
    assert found["test_mine"]["stats"]["rounds"] == 5
    facts = found["test_the_suites"]["extra_info"]
    assert (facts["implementation"], facts["check"]["ok"], facts["cache"]) == ("torch.sdpa", True, "warm")
    assert facts["case"].startswith("batch=2 ctx=5..20")
    assert facts["device"] and facts["tflops"] > 0 and facts["kernels"]
    assert found["test_mine"]["extra_info"]["implementation"] == "yours.attend"
    assert len({each["group"] for each in saved["benchmarks"]}) == 1


def test_a_saved_session_is_compared(saved, session, folder):
    done = session("test_mine.py", "-k", "slow", "--benchmark-only", "--benchmark-compare=0001",
                   "--benchmark-compare-fail=min:2000%", "--benchmark-group-by=param")  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "test_slow (0001_one)" in done.stdout and "test_slow (NOW)" in done.stdout
    tool = Path(sys.executable).parent / "pytest-benchmark"
    (stored,) = folder.rglob("0001_one.json")
    done = subprocess.run([tool, "compare", stored], capture_output=True, text=True, check=True, cwd=folder)
    assert "test_the_suites" in done.stdout


def test_without_benchmarks_it_is_a_test_of_the_kernel(session):
    done = session("test_mine.py::test_mine", "--benchmark-disable")
    assert done.returncode == 0, done.stdout


def test_what_is_wrong_fails_and_what_cannot_run_is_skipped(session):
    done = session("test_wrong.py", "-rsf")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    reasons = [line for line in lines if line.startswith(("FAILED", "SKIPPED"))]
    text = done.stdout
    assert "yours.half is wrong: " in text and "rows are off" in text
    assert "yours.raises is error: RuntimeError: no such luck" in text
    assert "no implementation of mla_decode is called 'torch.sdp'" in text
    assert "7 is no kernel: give a function of (operands, out), or a name" in text
    assert "names 2 cases; a benchmark is of one" in text
    assert sum(line.startswith("SKIPPED") for line in reasons) == 1, "FlashMLA needs a GPU"


def test_the_suites_own_kernels_as_benchmarks(cli):
    command = [sys.executable, "-m", "pytest", "-q", "--benchmark-only",
               "tests/harness/test_kernel_benchmarks.py",
               "--kernel-op", "mha_prefill", "--kernel-impl", "torch.sdpa,torch.naive",
               "--kernel-case", "batch=1,2 new=5", "--kernel-cache", "warm"]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=cli.environment(), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    assert done.stdout.count("benchmark 'mha_prefill batch=") == 2, "grouped by case"
