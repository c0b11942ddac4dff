"""A run from the command line: its outputs, and going on with it."""

import csv
import io
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from harness.machine.cpu_threads import ALLOWED
from harness.results.schema import KEYS, SCHEMA, Cell
from harness.run.device import device_lock
from kernels.platform import detect
from tests.support.command_line import PLUGIN, TINY, contents, error_line, undisturbed
from tests.support.paths import ROOT
from tests.support.workers_here import run_here


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def finished(place):
    """A run of two that can run and one whose library is missing, with all its outputs."""
    (place / "plugin.py").write_text(PLUGIN)
    (place / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place / "tmp"))
        done = run_here(
            *("--op", "mla_decode", *TINY, "--impl", "torch.sdpa,torch.naive,elsewhere.*"),
            *("--out", place / "run", "--json", "-", "--csv", place / "cells.csv"),
            plugin=place / "plugin.py",
        )
    assert done.returncode == 0, done.stderr
    return done


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_on_stdout_is_one_object_and_tables_go_beside_it(finished, place):
    whole = strict(finished.stdout)
    assert set(whole) == {"run", "cells", "verdicts"}
    assert whole["run"]["provenance"]["machine"]["platform"] == "cpu"
    assert whole["run"]["command"][:3] == ["run", "--op", "mla_decode"]
    assert {(v["a"], v["b"]) for v in whole["verdicts"]} >= {("torch.naive", "torch.sdpa")}
    assert "implementation" in finished.stderr and "no_such_library is not installed" in finished.stderr
    assert not list((place / "tmp").glob("*kernel-bench*"))

    cells = {cell["impl"]: cell for cell in whole["cells"]}
    missing = cells.pop("elsewhere.kernel")
    assert (missing["status"], missing["time_us"]) == ("unsupported", None)
    assert missing["reason"] == "no_such_library is not installed; there is none"
    assert set(cells) == {"torch.sdpa", "torch.naive"}
    for cell in cells.values():
        assert set(cell) == {KEYS.get(name, name) for name in Cell.model_fields} - {"kind"}
        assert (cell["status"], undisturbed(cell["reason"])) == ("ok", "")
        assert all(cell[name] > 0 for name in ("tflops", "gbps", "percent_of_ceiling", "setup_s"))
        assert cell["check"]["ok"] and cell["kernels"]
        blocks = set(cell["samples"]["block"])  # how many fit into the budget is the machine's affair
        assert blocks == set(range(len(blocks))), "every preparation"
        assert len(blocks) == 1 or 0 < cell["low_us"] <= cell["time_us"] <= cell["high_us"]
        assert (cell["platform"], cell["launch"], cell["cache"]) == ("cpu", "eager", "warm")


def test_csv_has_the_cells_and_a_finished_run_can_be_printed_again(finished, place):
    """Resuming what is finished measures nothing; outputs are those of the whole run."""
    rows = list(csv.DictReader((place / "cells.csv").open()))
    cells = strict(finished.stdout)["cells"]
    assert [row["impl"] for row in rows] == [cell["impl"] for cell in cells]
    assert set(rows[0]) == {KEYS.get(name, name) for name in Cell.model_fields} - {"kind", "samples"}
    for row, cell in zip(rows, cells, strict=True):
        assert float(row["time_us"] or 0) == pytest.approx(cell["time_us"] or 0)
    before = contents(place)
    plugin = place / "plugin.py"
    again = run_here("--resume", place / "run", "--json", "-", plugin=plugin)
    assert (again.returncode, strict(again.stdout)) == (0, strict(finished.stdout))
    table = run_here("--resume", place / "run", "--csv", "-", plugin=plugin)
    assert list(csv.DictReader(io.StringIO(table.stdout))) == rows
    assert contents(place) == before
    done = run_here("--op", "mla_decode", *TINY, "--out", place / "run")
    assert re.search("already holds a run; choose another --out, or --resume ", error_line(done))
    assert contents(place) == before


@pytest.fixture
def measured_by_another():
    with device_lock(detect("cpu")):
        yield


@pytest.mark.parametrize(("words", "said"), [
    ("run", "--op is missing"),
    ("run --op mla_decode --impl vllm.amxx", "unknown implementation 'vllm.amxx'"),
    ("run --op mla_decode --suite r1tp8", "unknown suite"),
    ("run --op mla_decode --case ctx=4,x=5", "sizes are separated by spaces"),
    ("run --op mla_decode --budget 5min", "cannot read --budget '5min'"),
    ("run --op mla_decode --baseline torch.sdp", "unknown baseline"),
    ("run --op mla_decode --set FOO", "cannot read --set 'FOO'"),
    ("run --op mla_decode --launch graph", "--launch graph needs a GPU"),
    ("run --op mla_decode --resume /nonexistent", "cannot read /nonexistent/run.json"),
    ("run --op mla_decode --out README.md", "cannot write results to README.md"),
    ("run --op mla_decode --cluster --suite r1tp8", "unknown suite"),
    ("toggle --op mla --flag A=1", "unknown op"),
    ("compare --revisions HEAD HEAD --op mla", "are the same commit"),
    ("check --op mla --impl torch.sdpa --case ctx=4", "unknown op"),
    ("campaign FILE", "unknown suite"),
])  # fmt: skip
def test_a_mistake_is_said_before_a_device_is_waited_for(
    here, measured_by_another, tmp_path, monkeypatch, words, said
):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "mine.toml"
    file.write_text('[[step]]\ncommand = "run"\nops = ["mla_decode"]\noptions.suite = "r1tp8"\n')
    assert said in error_line(here(*words.replace("FILE", str(file)).split(), "--device", "cpu"))


def test_a_check_on_a_cpu_times_nothing_and_waits_for_nobody(measured_by_another):
    case = "batch=1 ctx=4 heads=4"
    done = run_here("--op", "mla_decode", "--impl", "torch.sdpa", "--case", case, command="check")
    assert (done.returncode, done.stdout.split(": ")[1]) == (0, "torch.sdpa is right\n")


def test_a_device_is_measured_by_one_run_at_a_time(here, tmp_path, monkeypatch):
    """Of users with different temporary folders, too; and a lock that cannot be had is one line."""
    with device_lock(detect("cpu")):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", None)
        done = here("run", "--op", "mla_decode", *TINY, "--out", tmp_path / "run")
    assert f" (process {os.getpid()}, since " in error_line(done, code=3)
    monkeypatch.setenv("KERNEL_BENCH_LOCKS", str(tmp_path))
    (tmp_path / f"deepseek-kernel-bench-cpu{min(ALLOWED)}.lock").mkdir()  # as another user's file is
    done = here("run", "--op", "mla_decode", *TINY, "--out", tmp_path / "run")
    assert "cannot lock device cpu: " in error_line(done, code=3)
    assert contents(tmp_path) == {}


# --resume


def refused(run: Path, *arguments: object, plugin: Path | None = None) -> str:
    return error_line(run_here("--resume", run, *arguments, plugin=plugin))


@pytest.fixture
def copied(finished, place, tmp_path):
    """A copy of the finished run, and how to change facts of its run.json."""
    shutil.copytree(place / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(("path", "value", "said"), [
    (["schema_version"], SCHEMA + 1, f"has schema {SCHEMA + 1}; this version of the suite reads up to "),
    (["op"], "mla_encode", "unknown op 'mla_encode'; did you mean mla_decode"),
    *(
        (["provenance", "machine", of], "another", f"was measured with {of} another; here it is ")
        for of in ("device", "arch", "driver")
    ),
    (["provenance", "machine", "device_id"], "cuda:1", "here it is cpu: give --device cuda:1"),
    (["provenance", "versions", "torch"], "9", "was measured with torch 9; here it is "),
    (["provenance", "versions", "aiter"], "1.0", "aiter 1.0; here it is None: start a new"),
])  # fmt: skip
def test_resume_of_another_run_than_this_machine_s_is_refused(copied, place, path, value, said):
    whole = inner = json.loads((copied / "run.json").read_text())
    *above, last = path
    for name in above:
        inner = inner[name]
    inner[last] = value
    (copied / "run.json").write_text(json.dumps(whole))
    assert said in refused(copied, plugin=place / "plugin.py")


def test_resume_without_a_kernel_with_another_plan_or_as_another_op_is_refused(copied):
    assert re.search("elsewhere.kernel, which is not here; set KERNEL_BENCH_PLUGINS", refused(copied))
    for words in (
        "--impl torch.*",
        "--case batch=1",
        "--suite smoke",
        "--out x",
        "--set A=1",
        "--cache warm",
    ):
        option, value = words.split(" ")
        assert f"leave out {option}" in refused(copied, option, value)
    assert "leave out --seed" in refused(copied, "--seed", "0")
    assert f"{copied} is a run of mla_decode, not fused_moe" in refused(copied, "--op", "fused_moe")
