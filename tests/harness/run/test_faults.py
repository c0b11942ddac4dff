"""What breaks costs itself only: contenders, workers, the run itself."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.results import read
from harness.results.journal import Journal
from harness.results.schema import Cell, Record
from tests.support.command_line import undisturbed
from tests.support.paths import SUPPORT

FAULTY = SUPPORT / "faulty_kernels.py"
TORCH = "torch.sdpa,torch.naive"


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def workers(serving: str = "", plugin: str = "") -> dict[int, int]:
    """Process -> parent of all workers of this session's runs, known by their TMPDIR; those that may import a
    plugin, if one is named."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if b"harness.workers.child.main" not in command or serving.encode() not in b" ".join(command):
                continue
            if plugin.encode() not in (process / "environ").read_bytes():
                continue
            if f"TMPDIR={os.environ['TMPDIR']}".encode() in (process / "environ").read_bytes().split(b"\0"):
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                found[int(process.name)] = int(parent)
        except OSError:
            continue  # it has just ended
    return found


@pytest.fixture
def start(cli) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a run whose stderr can be read as it comes; none outlives its test."""
    runs: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **variables: object) -> subprocess.Popen[str]:
        runs.append(
            subprocess.Popen(
                cli.command("run", *arguments),
                cwd=cli.folder,
                env=cli.environment(**variables),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return runs[-1]

    yield start
    for run in runs:
        if run.poll() is None:
            run.kill()
            run.communicate()


def cells(records: list[Record]) -> dict[str, Cell]:
    return {r.impl: r for r in records if isinstance(r, Cell)}


# Contenders


@pytest.fixture(scope="module")
def faulty(cli, tmp_path_factory):
    """One case with every fault in one worker, and two that are right in another."""
    out = tmp_path_factory.mktemp("faults") / "run"
    done = cli(
        *("run", "--op", "mla_decode", "--device", "cpu", "--case", "batch=2 ctx=20..300"),
        *("--impl", f"faulty.*,{TORCH}", "--budget", "4s", "--out", out),
        # Far more than a starved machine's torch takes to be imported, and its profiler to begin.
        *("--prepare-timeout", "30", "--call-timeout", "20", "--threads", "1"),
        KERNEL_BENCH_PLUGINS=FAULTY,
    )
    (records,) = Journal(out).finished().values()
    return done, cells(records)


def test_a_fault_is_a_failure_of_the_run(faulty):
    done, found = faulty
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(found) == 8


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("hang_prepare", "timeout", "no answer within 30 s while in prepare"),
        ("raise_prepare", "error", "RuntimeError: no such luck"),
        ("unsupported", "unsupported", "this build has no such kernel"),
        ("raise_call", "error", "RuntimeError: out of luck"),
        ("hang_call", "timeout", "no answer within 20 s while in turn"),
        ("segfault", "crashed", "the worker died of SIGSEGV while in turn"),
    ],
)
def test_a_fault_is_named(faulty, name, status, reason):
    done, found = faulty
    cell = found[f"faulty.{name}"]
    assert (cell.status, cell.reason, cell.time_us) == (status, reason, None)
    assert reason in done.stdout


@pytest.mark.parametrize("name", TORCH.split(","))
def test_a_fault_costs_nobody_else(faulty, name):
    cell = faulty[1][name]
    assert (cell.status, undisturbed(cell.reason)) == ("ok", "")
    assert cell.time_us > 0
    blocks = set(cell.samples.block)  # how many fit into the budget is the machine's affair
    assert blocks == set(range(len(blocks)))
    assert len(blocks) > 1


# A worker killed from outside, and crashed cells measured again

WAITING = """
import time
from pathlib import Path
from kernels.mla_decode.providers.torch_eager import NaiveMlaDecode

HERE = Path(__file__).parent


class Waiting(NaiveMlaDecode):
    op = "mla_decode"
    name = "waiting.kernel"  # in one worker with torch's

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
def waiting(tmp_path):
    """A plugin that, in its turn in a case of batch 2, waits for the test to find it."""
    (tmp_path / "plugin.py").write_text(WAITING)
    (tmp_path / "wait").touch()
    return tmp_path


SMALL = ("--op", "mla_decode", "--device", "cpu", "--cache", "warm", "--threads", "1")


@pytest.mark.slow
def test_a_worker_killed_in_a_turn_and_retried(cli, start, waiting):
    out, plugin = waiting / "run", {"KERNEL_BENCH_PLUGINS": waiting / "plugin.py"}
    run = start(
        *(*SMALL, "--case", "batch=1,2 ctx=5..20", "--impl", f"waiting.*,{TORCH}"),
        *("--budget", "4s", "--per-case", "1s", "--out", out),
        **plugin,
    )
    assert within(120, (waiting / "waits").exists)
    importing = f"KERNEL_BENCH_PLUGINS={waiting / 'plugin.py'}"
    (victim,) = [w for w, parent in workers("child.bench:Bench", importing).items() if parent == run.pid]
    os.kill(victim, signal.SIGKILL)
    stderr = run.communicate(timeout=600)[1]
    assert run.returncode == 1, stderr

    first, second = map(cells, Journal(out).finished().values())
    assert {cell.status for cell in first.values()} == {"ok"}
    crashed = second.pop("waiting.kernel")
    assert crashed.status == "crashed"
    assert crashed.reason.startswith("the worker died of SIGKILL while in turn")
    assert {cell.status for cell in second.values()} == {"ok"}

    # Without --retry a crashed cell is finished.
    before = (out / "cells.jsonl").read_bytes()
    assert cli("run", "--resume", out, **plugin).returncode == 1
    assert (out / "cells.jsonl").read_bytes() == before

    (waiting / "wait").unlink()
    retried = cli("run", "--resume", out, "--retry", **plugin)
    assert retried.returncode == 0, retried.stderr
    assert "batch=2" in retried.stderr
    assert "batch=1" not in retried.stderr
    assert (out / "cells.jsonl").read_bytes().startswith(before)
    again = list(map(cells, Journal(out).finished().values()))
    assert again[0] == first
    assert {name: cell.status for name, cell in again[1].items()} == dict.fromkeys(first, "ok")
    assert len(read.load(out)) == 6


# The run itself, stopped and killed


def test_a_run_killed_while_a_worker_hangs_leaves_none(start, waiting):
    run = start(
        *(*SMALL, "--case", "batch=2 ctx=5..20", "--impl", "waiting.*,torch.sdpa"),
        *("--budget", "3s", "--out", waiting / "run"),
        KERNEL_BENCH_PLUGINS=waiting / "plugin.py",
    )
    assert within(120, (waiting / "waits").exists)
    assert set(workers().values()) == {run.pid}
    run.kill()
    run.communicate()
    assert within(120, lambda: not workers())


def test_control_c(start, tmp_path):
    out = tmp_path / "run"
    run = start(*SMALL, "--case", "batch=1 ctx=5", "--impl", TORCH, "--budget", "60s", "--out", out)
    assert any(line.endswith("  measuring\n") for line in run.stderr)
    run.send_signal(signal.SIGINT)
    stderr = run.communicate(timeout=120)[1]
    assert run.returncode == 130
    assert stderr.strip() == "stopped; finished cases are recorded, --resume RUN measures the rest"
    assert not workers()
    assert Journal(out).finished() == {}


def one_more(out: Path, finished: int) -> bool:
    journal = out / "cells.jsonl"
    return journal.exists() and journal.read_bytes().count(b'{"kind":"case"') > finished


def kill_again_and_again(cli, start, out: Path, cases: int, moments: list[float | None]) -> list[int]:
    """Starts or resumes a run and kills it at each moment, in seconds from its start, None: as soon as it has
    finished one more case; asserts that no finished case is ever lost. How many were finished after each."""
    lengths = ",".join(str(5 + i) for i in range(cases))
    tiny = (
        "--case",
        f"batch=1 ctx={lengths}",
        "--impl",
        TORCH,
        "--budget",
        f"{20 * cases}s",
        "--per-case",
        "0.1s",
    )
    begin, resume = (*SMALL, *tiny, "--out", out), ("--resume", out)
    finished, written, counts = {}, b"", []
    for moment in moments:
        run = start(*(resume if (out / "run.json").exists() else begin))
        if moment is None and len(finished) < cases:
            assert within(120, lambda: one_more(out, len(finished)))  # noqa: B023 - called at once
        else:
            time.sleep(moment or 0)
        run.kill()
        stderr = run.communicate()[1]
        assert "error" not in stderr
        assert within(120, lambda: not workers()), "a worker outlived its run"
        if (out / "run.json").exists():
            after = Journal(out).finished()
            assert list(after.items())[: len(finished)] == list(finished.items())
            finished = after
            assert (out / "cells.jsonl").read_bytes().startswith(written)
            lines = (out / "cells.jsonl").read_bytes().splitlines(keepends=True)
            ends = [i for i, line in enumerate(lines, 1) if line.startswith(b'{"kind":"case"')]
            written = b"".join(lines[: ends[len(finished) - 1]]) if finished else b""
        counts.append(len(finished))

    last = cli("run", *(resume if (out / "run.json").exists() else begin))
    assert last.returncode == 0, last.stderr
    assert (out / "cells.jsonl").read_bytes().startswith(written)
    completed = Journal(out).finished()
    assert [case["key"] for case in json.loads((out / "run.json").read_text())["cases"]] == list(completed)
    assert {key: completed[key] for key in finished} == finished
    assert len(completed) == cases
    for key, records in completed.items():
        assert {cell.status for cell in cells(records).values()} == {"ok"}
        assert (key in last.stderr) == (key not in finished), "measured if and only if it was unfinished"
    return counts


@pytest.mark.slow
def test_a_run_killed_five_times_loses_no_finished_case(cli, start, tmp_path):
    rng = random.Random(20)
    moments = [rng.uniform(at, at + 2) for at in (4, 0, 6, 2)]  # a run begins to measure after some 4 s
    counts = kill_again_and_again(cli, start, tmp_path / "run", 6, [*moments[:2], None, *moments[2:]])
    assert counts[2] > 0
