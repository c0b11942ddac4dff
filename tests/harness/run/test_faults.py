"""Killed and interrupted runs and workers: no process stays behind, nothing that was finished is lost."""

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.results import read
from harness.results.journal import Journal
from harness.results.schema import Cell, Record
from tests.support.serving_processes import comes

TORCH = "torch.sdpa,torch.naive"
SMALL = ("--op", "mla_decode", "--device", "cpu", "--cache", "warm", "--threads", "1")


def workers(serving: str = "") -> dict[int, int]:
    """The worker processes of this session's runs, known by their TMPDIR, each with its parent's id."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if b"harness.workers.child.main" not in command or serving.encode() not in b" ".join(command):
                continue
            if f"TMPDIR={os.environ['TMPDIR']}".encode() in (process / "environ").read_bytes().split(b"\0"):
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                parents[int(process.name)] = int(parent)
        except OSError:
            continue  # it has just ended
    return parents


@pytest.fixture
def start(cli) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a run whose stderr can be read as it comes; none outlives its test."""
    runs: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **variables: object) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        command, environment = cli.command("run", *arguments), cli.environment(**variables)
        runs.append(subprocess.Popen(command, cwd=cli.folder, env=environment, **pipes))
        return runs[-1]

    yield start
    for run in runs:
        if run.poll() is None:
            run.kill()
            run.communicate()


def cells(records: list[Record]) -> dict[str, Cell]:
    return {r.impl: r for r in records if isinstance(r, Cell)}


WAITING = """
import time
from pathlib import Path
from kernels.mla_decode.providers.torch_eager import naive as NaiveMlaDecode

HERE = Path(__file__).parent


class Waiting(NaiveMlaDecode):
    op = "mla_decode"
    name = "waiting.kernel"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        call, calls = prepared.call, []

        def waiting():
            calls.append(1)
            if len(calls) > 2 and len(operands.host_lengths) == 2 and (HERE / "wait").exists():
                (HERE / "waits").touch()
                time.sleep(3600)
            call()

        prepared.call = waiting
        return prepared
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    """A plugin that, in its sample in a case of batch 2, waits for the test to find it."""
    (tmp_path / "plugin.py").write_text(WAITING)
    (tmp_path / "wait").touch()
    return tmp_path


@pytest.mark.slow
def test_a_worker_is_killed_in_a_sample_and_the_case_retried(cli, start, waiting):
    out, plugin = waiting / "run", {"KERNEL_BENCH_PLUGINS": waiting / "plugin.py"}
    run = start(
        *(*SMALL, "--case", "batch=1,2 ctx=5..20", "--impl", f"waiting.*,{TORCH}"),
        *("--budget", "4s", "--per-case", "1s", "--out", out),
        **plugin,
    )
    assert comes((waiting / "waits").exists)
    for worker in workers("child.bench:Bench"):
        if str(waiting / "plugin.py").encode() in Path(f"/proc/{worker}/environ").read_bytes():
            os.kill(worker, signal.SIGKILL)
    stderr = run.communicate()[1]
    assert run.returncode == 1, stderr

    first, second = map(cells, Journal(out).finished().values())
    assert {cell.status for cell in first.values()} == {"ok"}
    crashed = second.pop("waiting.kernel")
    assert crashed.status == "crashed"
    assert crashed.reason.startswith("the worker died of SIGKILL while in sample")
    assert {cell.status for cell in second.values()} == {"ok"}

    # Without --retry a crashed cell is finished.
    before = (out / "cells.jsonl").read_bytes()
    assert cli("run", "--resume", out, **plugin).returncode == 1
    assert (out / "cells.jsonl").read_bytes() == before

    (waiting / "wait").unlink()
    retried = cli("run", "--resume", out, "--retry", **plugin)
    assert retried.returncode == 0, retried.stderr
    assert ("batch=2" in retried.stderr, "batch=1" in retried.stderr) == (True, False)
    assert (out / "cells.jsonl").read_bytes().startswith(before)
    again = list(map(cells, Journal(out).finished().values()))
    assert again[0] == first
    assert {name: cell.status for name, cell in again[1].items()} == dict.fromkeys(first, "ok")
    assert len(read.load(out)) == 6


@pytest.mark.slow
def test_a_run_killed_while_a_worker_hangs_leaves_none(start, waiting):
    run = start(
        *(*SMALL, "--case", "batch=2 ctx=5..20", "--impl", "waiting.*,torch.sdpa"),
        *("--budget", "3s", "--out", waiting / "run"),
        KERNEL_BENCH_PLUGINS=waiting / "plugin.py",
    )
    assert comes((waiting / "waits").exists)
    assert set(workers().values()) == {run.pid}
    run.kill()
    run.communicate()
    assert comes(lambda: not workers())


def test_control_c(start, tmp_path):
    out = tmp_path / "run"
    run = start(*SMALL, "--case", "batch=1 ctx=5", "--impl", "torch.naive", "--budget", "60s", "--out", out)
    assert any(line.endswith("  measuring\n") for line in run.stderr)
    run.send_signal(signal.SIGINT)
    stderr = run.communicate()[1]
    assert run.returncode == 130
    said, rest = stderr.strip().split("\n")
    assert said == "stopped; finished cases are recorded; the rest:"
    assert shlex.split(rest)[1:] == ["-m", "harness", "run", "--resume", str(out)]
    assert not workers()
    assert Journal(out).finished() == {}


def test_control_c_while_a_worker_hangs_in_a_check(start, tmp_path):
    """The thread that waits for the killed worker starts no other one for the next row, which hangs too."""
    plugin, second = tmp_path / "plugin.py", '\nclass Other(Waiting):\n    name = "waiting.other"\n'
    plugin.write_text(WAITING.replace("len(calls) > 2 and len(operands.host_lengths) == 2 and ", "") + second)
    (tmp_path / "wait").touch()
    run = start(
        *(*SMALL, "--case", "batch=2 ctx=5..20", "--impl", "torch.naive,waiting.*"),
        *("--out", tmp_path / "run"),
        KERNEL_BENCH_PLUGINS=plugin,
    )
    assert comes((tmp_path / "waits").exists)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=30)
    assert (run.returncode, workers()) == (130, {})


@pytest.mark.slow
def test_a_run_killed_after_a_case_keeps_it_and_measures_the_rest(cli, start, tmp_path):
    out = tmp_path / "run"
    cases = ("--case", "batch=1 ctx=5,6", "--impl", TORCH, "--budget", "60s", "--per-case", "0.1s")
    run = start(*SMALL, *cases, "--out", out)
    assert comes(lambda: (out / "run.json").exists() and Journal(out).finished())
    run.kill()
    run.communicate()
    assert comes(lambda: not workers())
    kept = Journal(out).finished()
    rest = cli("run", "--resume", out, "--budget", "0.1s")  # beside the seconds already spent
    assert rest.returncode == 0, rest.stderr
    completed = Journal(out).finished()
    assert len(completed) == 2 and {key: completed[key] for key in kept} == kept
    assert all((key in rest.stderr) == (key not in kept) for key in completed)
