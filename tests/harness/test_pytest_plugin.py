"""The fixture `kernel_benchmark` in a real pytest session, from a user's own file elsewhere."""

import contextlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from harness.paths import ROOT
from harness.pytest_plugin import DeviceClock

MINE = """
import pytest
import torch

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

def raises(o, out):
    raise RuntimeError("no such luck")

@pytest.mark.parametrize("kernel", [attend, "torch.sdpa", half, raises, "flashmla", "torch.sdp", 7])
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


@pytest.fixture
def benchmark() -> SimpleNamespace:
    made = SimpleNamespace(
        stats=SimpleNamespace(stats=SimpleNamespace(median=7.0)), group=None, extra_info={}
    )
    made.pedantic = lambda turn, **how: made.extra_info.update(how) or turn()
    return made


@pytest.mark.parametrize(
    ("begins", "ends", "outcome", "said"),
    [
        (None, None, None, ""),
        ("unsupported", None, pytest.skip.Exception, "why"),
        ("wrong", None, pytest.fail.Exception, "mine is wrong: why"),
        (None, "wrong", pytest.fail.Exception, "mine is wrong: why"),
    ],
)
@pytest.mark.benchmark(timer=DeviceClock())
def test_the_options_hold_and_a_kernel_is_judged_twice(request, monkeypatch, begins, ends, outcome, said):
    given, closed = [], []
    kernel = SimpleNamespace(status=None, reason="why", name="mine", case=SimpleNamespace(key="a case"))
    kernel.begin, kernel.end = (lambda s=s: setattr(kernel, "status", s) for s in (begins, ends))
    kernel.turn, kernel.facts = (lambda: 0.5), (lambda typical: {"typical": typical})
    kernel.close = lambda: closed.append(True)
    made = SimpleNamespace(benchmark=lambda *words, **case: given.append((words, case)) or kernel)
    monkeypatch.setattr("harness.run.single.KernelBenchmarks", lambda *of: given.append(of[:3]) or made)
    monkeypatch.setattr("harness.machine.device.choose_device", lambda name: name)
    for name, value in (("device", "cuda:1"), ("cache", "cold"), ("launch", "eager")):
        monkeypatch.setattr(request.config.option, f"kernel_{name}", value)
    measure = request.getfixturevalue("kernel_benchmark")
    with pytest.raises(outcome, match=f"^{said}$") if outcome else contextlib.nullcontext():
        facts = measure("mla_decode", "a kernel", rounds=3, case="batch=1")
        assert facts == {"rounds": 3, "iterations": 1, "warmup_rounds": 1, "typical": 7.0}
        assert request.node.get_closest_marker("benchmark").kwargs["timer"].now > 0
    assert given == [("cuda:1", "cold", "eager"), (("mla_decode", "a kernel"), {"case": "batch=1"})]
    assert closed


@pytest.mark.slow
def test_stats_are_of_calls_what_is_wrong_fails_and_what_cannot_run_is_skipped(cli, tmp_path):
    (tmp_path / "test_mine.py").write_text(MINE)
    done = session(cli, tmp_path, "test_mine.py", "-rsf", "--benchmark-json=out.json")
    assert done.returncode == 1
    for said in (
        "yours.half is wrong: ",
        "rows are off",
        "yours.raises is error: RuntimeError: no such luck",
        "no implementation of mla_decode is called 'torch.sdp'",
        "7 is no kernel: give a function of (operands, out), or a name",
        "names 2 cases; a benchmark is of one",
    ):
        assert said in done.stdout
    assert "2 passed, 1 skipped" in done.stdout.replace("5 failed, ", ""), "FlashMLA needs a GPU"
    mine, suites = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert (mine["stats"]["rounds"], mine["extra_info"]["implementation"]) == (5, "yours.attend")
    facts = suites["extra_info"]
    assert (facts["implementation"], facts["check"]["ok"], facts["cache"]) == ("torch.sdpa", True, "warm")
    assert facts["case"].startswith("batch=2 ctx=5..20")
    assert facts["device"] and facts["tflops"] > 0 and facts["kernels"]
    assert mine["group"] == suites["group"]


@pytest.mark.slow
def test_the_suites_own_kernels_as_benchmarks(cli):
    words = ("-q", "--benchmark-only", "tests/harness/test_kernel_benchmarks.py")
    chosen = ("--kernel-op", "mha_prefill", "--kernel-impl", "torch.sdpa", "--kernel-case", "batch=1 new=5")
    done = session(cli, ROOT, *words, *chosen, "--kernel-cache", "warm")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert done.stdout.count("benchmark 'mha_prefill batch=1 new=5") == 1, "grouped by case"
