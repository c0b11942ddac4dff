"""A run from the command line: its outputs, and going on with it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import kernels
from harness.cli.run_display import RunDisplay
from harness.machine.cpu_threads import ALLOWED
from harness.results.schema import SCHEMA
from harness.run.device_lock import device_lock
from harness.run.execute import run
from harness.run.request import Request
from kernels.platform import Platform, detect
from kernels.vendor import VllmCpu
from tests.support.command_line import PLUGIN, TINY, contents, error_line, undisturbed
from tests.support.workers_here import run_here


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def finished(cli, place):
    """A run of two that can run and one whose library is missing, with all its outputs."""
    (place / "plugin.py").write_text(PLUGIN)
    (place / "tmp").mkdir()
    done = cli(
        *("run", "--op", "mla_decode", *TINY, "--impl", "torch.sdpa,torch.naive,elsewhere.*"),
        # So that a machine that is starved makes several blocks, too.
        *("--budget", "4s", "--out", place / "run", "--json", "-", "--csv", place / "cells.csv"),
        KERNEL_BENCH_PLUGINS=place / "plugin.py",
        TMPDIR=place / "tmp",
    )
    assert done.returncode == 0, done.stderr
    return done


CELL = {
    *("op", "case", "boundary", "impl", "platform", "arch", "arm", "launch", "cache", "status", "reason"),
    *("time_us", "low_us", "high_us", "tflops", "gbps", "percent_of_ceiling", "check", "kernels", "setup_s"),
}
VERDICT = {"case", "a", "b", "ratio", "low", "high", "floor", "verdict"}


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_on_stdout_is_one_object(finished):
    whole = strict(finished.stdout)
    assert set(whole) == {"run", "cells", "verdicts"}
    assert whole["run"]["provenance"]["machine"]["platform"] == "cpu"
    assert whole["run"]["provenance"]["versions"]["torch"]
    assert whole["run"]["command"][:3] == ["run", "--op", "mla_decode"]
    assert {cell["impl"] for cell in whole["cells"]} == {"torch.sdpa", "torch.naive", "elsewhere.kernel"}
    assert all(CELL <= set(cell) for cell in whole["cells"])
    assert all(VERDICT <= set(verdict) for verdict in whole["verdicts"])
    assert {(v["a"], v["b"]) for v in whole["verdicts"]} >= {("torch.naive", "torch.sdpa")}
    assert "implementation" in finished.stderr, "the table goes to stderr then"


def test_what_ran_has_times(finished):
    for cell in strict(finished.stdout)["cells"]:
        if cell["impl"] == "elsewhere.kernel":
            continue
        assert (cell["status"], undisturbed(cell["reason"])) == ("ok", "")
        assert 0 < cell["low_us"] <= cell["time_us"] <= cell["high_us"]
        assert cell["tflops"] > 0
        assert cell["gbps"] > 0
        assert cell["percent_of_ceiling"] > 0
        assert cell["check"]["ok"]
        assert cell["kernels"]
        assert cell["setup_s"] > 0
        blocks = set(cell["samples"]["block"])  # how many fit into the budget is the machine's affair
        assert blocks == set(range(len(blocks))), "every preparation"
        assert len(blocks) > 1
        assert (cell["platform"], cell["arm"], cell["launch"]) == ("cpu", "plain", "eager")
        assert (cell["op"], cell["boundary"], cell["cache"]) == ("mla_decode", "core", "warm")


def test_a_missing_library_is_a_reason_and_no_failure(finished):
    (cell,) = [c for c in strict(finished.stdout)["cells"] if c["impl"] == "elsewhere.kernel"]
    assert (cell["status"], cell["time_us"]) == ("unsupported", None)
    assert cell["reason"] == "no_such_library is not installed; there is none"
    assert "no_such_library is not installed" in finished.stderr


def test_csv_has_the_cells(finished, place):
    rows = list(csv.DictReader((place / "cells.csv").open()))
    cells = strict(finished.stdout)["cells"]
    assert [row["impl"] for row in rows] == [cell["impl"] for cell in cells]
    assert set(rows[0]) >= CELL
    for row, cell in zip(rows, cells, strict=True):
        assert float(row["time_us"] or 0) == pytest.approx(cell["time_us"] or 0)


def test_a_finished_run_can_be_printed_again(finished, place):
    """Resuming what is finished measures nothing; outputs are those of the whole run."""
    before = contents(place)
    plugin = place / "plugin.py"
    again = run_here("--resume", place / "run", "--json", "-", plugin=plugin)
    assert again.returncode == 0
    assert strict(again.stdout) == strict(finished.stdout)
    table = run_here("--resume", place / "run", "--csv", "-", plugin=plugin)
    assert list(csv.DictReader(io.StringIO(table.stdout))) == list(
        csv.DictReader((place / "cells.csv").open())
    )
    assert contents(place) == before


def test_nothing_could_run(tmp_path, monkeypatch):
    """The same in this process, where vLLM can be taken away."""
    installed = kernels.platform.version
    monkeypatch.setattr("kernels.platform.version", lambda name: None if name == "vllm" else installed(name))
    request = Request(
        op="mla_decode",
        impl="vllm.*",
        baseline="vllm.amx",
        case=["batch=1 ctx=4"],
        device="cpu",
        out=str(tmp_path / "run"),
        json=str(tmp_path / "found.json"),
        quiet=True,
    )
    assert run(request, RunDisplay(request)) == 3
    cells = strict((tmp_path / "found.json").read_text())["cells"]
    rows = {row.name for row in kernels.implementations("mla_decode") if row.name.startswith("vllm.")}
    assert {cell["impl"] for cell in cells} == rows
    assert {cell["status"] for cell in cells} == {"unsupported"}
    assert all(cell["reason"] for cell in cells)


def test_without_vllm_its_kernels_say_so(monkeypatch):
    monkeypatch.setattr("kernels.platform.version", lambda name: None if name == "vllm" else "1")
    platform = Platform(
        "cpu", "x86-amx", features=frozenset({"avx512f", "avx512_bf16", "amx_bf16", "amx_tile"})
    )
    for impl in kernels.implementations("mla_decode"):
        if isinstance(impl, VllmCpu):
            assert impl.available(platform).reason.startswith("vllm is not installed; pip install")


def test_a_run_is_not_written_over(here, finished, place):
    before = contents(place / "run")
    done = here("run", "--op", "mla_decode", *TINY, "--out", place / "run")
    assert re.search("already holds a run; choose another --out, or --resume ", error_line(done))
    assert contents(place / "run") == before


def test_a_device_is_measured_by_one_run_at_a_time(here, tmp_path):
    with device_lock(detect("cpu")):
        done = here("run", "--op", "mla_decode", *TINY, "--out", tmp_path / "run")
    assert f"device cpu is being measured by process {os.getpid()}; " in error_line(done, code=3)
    assert contents(tmp_path) == {}


def test_a_lock_that_cannot_be_had_is_one_line(cli, tmp_path):
    """Another user's lock file in a shared /tmp, say."""
    (tmp_path / f"deepseek-kernel-bench-cpu{min(ALLOWED)}.lock").mkdir()
    done = cli("run", "--op", "mla_decode", *TINY, "--out", tmp_path / "run", KERNEL_BENCH_LOCKS=tmp_path)
    assert "cannot lock device cpu: " in error_line(done, code=3)
    assert contents(tmp_path) == {}


def test_a_lock_does_not_depend_on_the_temporary_folder(cli, tmp_path):
    """Two users with different ones would measure at once."""
    with device_lock(detect("cpu")):
        done = cli("run", "--op", "mla_decode", *TINY, "--out", tmp_path / "run", TMPDIR=tmp_path)
    assert "is being measured by process" in error_line(done, code=3)


def test_a_lock_serves_whoever_comes_later(monkeypatch, tmp_path):
    monkeypatch.setenv("KERNEL_BENCH_LOCKS", str(tmp_path))
    old = os.umask(0o077)
    try:
        for _ in range(2):
            with device_lock(detect("cpu")):
                assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o666}
    finally:
        os.umask(old)


def test_nothing_is_left_in_the_temporary_folder(finished, place):
    assert not list((place / "tmp").glob("*kernel-bench*"))


# --resume


def refused(run: Path, *arguments: object, plugin: Path | None = None) -> str:
    return error_line(run_here("--resume", run, *arguments, plugin=plugin))


@pytest.fixture
def copied(finished, place, tmp_path):
    """A copy of the finished run, and how to change facts of its run.json."""
    shutil.copytree(place / "run", tmp_path / "run")
    return tmp_path / "run"


def edit(run: Path, *path: str, value: object) -> None:
    whole = json.loads((run / "run.json").read_text())
    inner = whole
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    (run / "run.json").write_text(json.dumps(whole))


def test_resume_of_what_is_not_there(tmp_path):
    line = refused(tmp_path / "nowhere")
    assert line == f"cannot read {tmp_path / 'nowhere' / 'run.json'}: No such file or directory"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("keep", [0, 1, 20, 300, -10])
def test_resume_of_a_truncated_run(copied, keep):
    text = (copied / "run.json").read_text()
    (copied / "run.json").write_text(text[:keep])
    assert f"cannot read {copied / 'run.json'}: " in refused(copied)


def test_resume_of_a_broken_journal(copied, place):
    with (copied / "cells.jsonl").open("r+b") as file:
        file.write(b"{broken")
    line = refused(copied, plugin=place / "plugin.py")
    assert f"cannot read {copied / 'cells.jsonl'}, line 1: " in line


def test_resume_of_a_newer_schema(copied):
    edit(copied, "schema_version", value=SCHEMA + 1)
    assert re.search(rf"has schema {SCHEMA + 1}; .* reads up to {SCHEMA}\b", refused(copied))


def test_resume_of_an_op_or_kernel_that_is_not_here(copied):
    assert re.search("elsewhere.kernel, which is not here; set KERNEL_BENCH_PLUGINS", refused(copied))
    edit(copied, "op", value="mla_encode")
    assert "unknown op 'mla_encode'; ops: " in refused(copied)


@pytest.mark.parametrize("value", [{}, {"machine": {}, "versions": {}}, {"machine": 3, "versions": 4}])
def test_resume_of_a_run_without_its_provenance(copied, place, value):
    edit(copied, "provenance", value=value)
    line = refused(copied, plugin=place / "plugin.py")
    assert line == f"cannot read {copied / 'run.json'}: its provenance is not whole"


@pytest.mark.parametrize(
    ("group", "name"),
    [("machine", "device"), ("machine", "arch"), ("machine", "driver"), ("versions", "torch")],
)
def test_resume_elsewhere_is_refused(copied, place, group, name):
    edit(copied, "provenance", group, name, value="another")
    line = refused(copied, plugin=place / "plugin.py")
    assert re.fullmatch(f"{copied} was measured with {name} another; here it is .*: start a new run", line)


def test_resume_with_a_library_less_or_more_is_refused(copied, place):
    edit(copied, "provenance", "versions", "aiter", value="1.0")
    line = refused(copied, plugin=place / "plugin.py")
    assert "was measured with aiter 1.0; here it is None" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("--impl", "torch.*"),
        ("--case", "batch=1 ctx=4"),
        ("--suite", "smoke"),
        ("--out", "x"),
        ("--set", "A=1"),
        ("--cache", "warm"),
        ("--seed", "0"),
    ],
)
def test_resume_with_another_plan_is_refused(copied, arguments):
    assert f"leave out {arguments[0]}" in refused(copied, *arguments)


def test_resume_as_another_op_is_refused(copied):
    assert f"{copied} is a run of mla_decode, not fused_moe" in refused(copied, "--op", "fused_moe")
