"""The command line as a user meets it: what it prints where, its exit codes, its one-line errors."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kernels
from harness import run_command
from harness.ceilings import ceilings
from harness.cli import main
from harness.records import SCHEMA
from harness.session import device_lock
from kernels.platform import Platform, detect

TINY = ("--device", "cpu", "--cache", "warm", "--case", "batch=1 ctx=5..20", "--budget", "3s")

PLUGIN = """
from kernels.mla_decode.torch_eager import Naive

class Elsewhere(Naive):
    op = "mla_decode"
    name = "elsewhere.kernel"
    requires = "a library that nobody has"

    def available(self, platform):
        return platform.library("no_such_library", install="there is none")
"""


def error_line(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The one line that a mistake gives."""
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.endswith("\n")
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


@pytest.fixture
def mistake(monkeypatch, capsys) -> Callable[..., str]:
    """Runs a command in this process, which starts sooner; returns the one line of its error."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["harness", *map(str, arguments)])
        code = main()
        return error_line(subprocess.CompletedProcess(sys.argv, code, *capsys.readouterr()))

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# Start-up

HEAVY = {"torch", "pandas", "numpy", "scipy", "pydantic", "vllm", "triton", "transformers", "rich"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["list", "--help"],
        ["list"],
        ["list", "impls"],
        ["list", "impls", "--platform", "rocm", "--arch", "gfx942"],
        ["list", "impls", "--json", "-"],
        ["list", "ops"],
        ["list", "suites"],
        ["list", "cases", "--suite", "smoke"],
        ["run", "--no-such-option"],
    ],
    ids=" ".join,
)
def test_help_and_list_import_nothing_heavy(cli, arguments):
    done = cli(*arguments, PYTHONPROFILEIMPORTTIME=1)
    imported = set(re.findall(r"^import time:.*\|\s*(\w+)", done.stderr, re.MULTILINE))
    assert {"harness", "kernels", "click"} <= imported
    assert not imported & HEAVY


def test_it_runs_from_any_folder(cli, tmp_path):
    done = subprocess.run(
        cli.command("list", "ops"),
        cwd=tmp_path,
        env=cli.environment(PYTHONPATH=cli.folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "mla_decode" in done.stdout


# list and doctor


@pytest.mark.parametrize(
    "what", [["ops"], ["impls"], ["cases", "--suite", "smoke"], ["suites"]], ids=" ".join
)
def test_list_prints_the_same_rows_as_table_and_json(cli, tmp_path, what):
    table = cli("list", *what)
    assert (table.returncode, table.stderr) == (0, "")
    printed = cli("list", *what, "--json", "-")
    written = cli("list", *what, "--json", tmp_path / "rows.json")
    assert (written.returncode, written.stdout) == (0, "")
    assert printed.stdout == (tmp_path / "rows.json").read_text()
    rows = json.loads(printed.stdout)
    assert rows
    for header in rows[0]:
        assert header in table.stdout


@pytest.mark.parametrize(
    ("platform", "arch"),
    [("rocm", "gfx942"), ("rocm", "gfx950"), ("cuda", "sm_90"), ("cuda", "sm_100"), ("cpu", "x86-amx")],
)
def test_list_says_what_runs_on_another_platform_and_why_not(cli, platform, arch):
    rows = json.loads(cli("list", "impls", "--platform", platform, "--arch", arch, "--json", "-").stdout)
    assert {row["op"] for row in rows} == set(kernels.OPS)
    by_name = {row["implementation"]: row for row in rows}
    assert by_name["torch.sdpa"]["runs"]
    for row in rows:
        assert row["runs"] or row["why not"], f"{row['implementation']} gives no reason"
    if platform != "cpu":
        assert not by_name["vllm.amx"]["runs"]
        assert by_name["vllm.amx"]["why not"] == f"needs cpu; this is {platform} {arch}"
        table = cli("list", "impls", "--platform", platform, "--arch", arch).stdout
        assert "(not this machine)" in table
        assert f"needs cpu; this is {platform} {arch}" in table


def test_list_cases_of_a_suite(cli):
    rows = json.loads(cli("list", "cases", "--suite", "smoke", "--op", "mla_decode", "--json", "-").stdout)
    assert {row["suite"] for row in rows} == {"smoke"}
    assert sum(row["weight"] for row in rows) == pytest.approx(1, abs=0.01)


def test_list_says_which_library_is_missing(cli, tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    rows = json.loads(cli("list", "impls", "--json", "-", KERNEL_BENCH_PLUGINS=plugin).stdout)
    (row,) = [row for row in rows if row["implementation"] == "elsewhere.kernel"]
    assert not row["runs"]
    assert row["why not"] == "no_such_library is not installed; there is none"


def test_doctor(cli):
    done = cli("doctor", "--json", "-")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert set(facts) >= {"machine", "devices", "libraries", "ceilings", "runs here", "what would improve it"}
    assert facts["libraries"]["torch"] != "not installed"


@pytest.mark.parametrize("stored", [None, "", "[]", "{", '{"KEY": 7}', '{"KEY": {"flops": 1}}'])
def test_stored_ceilings_that_cannot_be_read_are_measured_again(monkeypatch, tmp_path, stored):
    class Meter:
        def __init__(self, role: str, environment: object, log: object) -> None:
            self.kill = lambda: None

        def ask(self, request: str, deadline: float, **arguments: object) -> dict[str, float]:
            return {"flops": 3.0, "bytes": 4.0}

    platform = Platform("cpu", "x86", name="a CPU")
    monkeypatch.setattr("harness.ceilings.Worker", Meter)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ceilings(platform, 2)
    (store,) = tmp_path.rglob("ceilings.json")
    (key,) = json.loads(store.read_text())
    if stored is None:
        store.unlink()
    else:
        store.write_text(stored.replace('"KEY"', json.dumps(key)))
    found = ceilings(platform, 2)
    assert (found.flops, found.bytes) == (3.0, 4.0)
    monkeypatch.delattr(Meter, "ask")
    assert ceilings(platform, 2) == found, "now it is stored"


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "--op is missing; ops: "),
        (["--op", "mla"], "unknown op 'mla'; ops: .*mla_decode"),
        (["--op", "mla_decode", "--impl", "cutlass.*"], "'cutlass.*'; there are: .*torch.sdpa"),
        (["--op", "mla_decode", "--impl", "torch.sdpa,"], "matches ''; there are: "),
        (["--op", "mla_decode", "--baseline", "torch"], "unknown baseline 'torch'; implementations: "),
        (["--op", "mla_decode", "--boundary", "edge"], "unknown boundary 'edge' .* boundaries: core"),
        (["--op", "mla_decode", "--suite", "r2"], "unknown suite 'r2'; suites: smoke"),
        (
            ["--op", "mla_decode", "--suite", "smoke", "--case", "batch=1 ctx=4"],
            "--suite or --case, not both",
        ),
        (["--op", "mla_decode", "--cache", "lukewarm"], "'lukewarm' is not one of 'serving'"),
        (["--op", "mla_decode", "--budget", "soon"], "cannot read --budget 'soon'; write for example 60s"),
        (["--op", "mla_decode", "--budget", "-5s"], "cannot read --budget '-5s'"),
        (["--op", "mla_decode", "--budget", "0"], "cannot read --budget '0'"),
        (["--op", "mla_decode", "--budget", "nan"], "cannot read --budget 'nan'"),
        (["--op", "mla_decode", "--budget", "inf"], "cannot read --budget 'inf'"),
        (["--op", "mla_decode", "--per-case", "5x"], "cannot read --per-case '5x'"),
        (["--op", "mla_decode", "--call-timeout", "nan"], "cannot read --call-timeout 'nan'"),
        (["--op", "mla_decode", "--prepare-timeout", "-1"], "cannot read --prepare-timeout '-1'"),
        (["--op", "mla_decode", "--set", "DEBUG"], "cannot read --set 'DEBUG'; write NAME=VALUE"),
        (["--op", "mla_decode", "--set", "=1"], "cannot read --set '=1'; write NAME=VALUE"),
        (["--op", "mla_decode", "--set", "OMP_NUM_THREADS=all"], "cannot read OMP_NUM_THREADS='all'"),
        (["--op", "mla_decode", "--threads", "0"], "0 is not in the range"),
        (["--op", "mla_decode", "--seed", "one"], "'one' is not a valid integer"),
        (["--op", "mla_decode", "--device", "cuda:99"], "no device 'cuda:99'; devices here: .*cpu"),
        (["--op", "mla_decode", "--device", "rubbish"], "no device 'rubbish'; devices here: .*cpu"),
        (["--op", "mla_decode", "--device", "cpu", "--launch", "graph"], "--launch graph needs a GPU"),
        (["--op", "mla_decode", "--device", "cpu", "--launch", "both"], "--launch both needs a GPU"),
        (["--op", "mla_decode", "--retry"], "--retry needs --resume RUN"),
        (["--op", "mla_decode", "--json", "-", "--csv", "-"], "--json - or --csv -, not both"),
        (["--op", "mla_decode", "--fast"], "No such option"),
        (["--op"], "requires an argument"),
        (["mla_decode"], "unexpected extra argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(mistake, tmp_path, arguments, wanted):
    assert re.search(wanted, mistake("run", "--out", tmp_path / "run", *arguments))
    assert contents(tmp_path) == {}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("", "an empty case; write for example 'batch=64"),
        ("batch=0 ctx=4", "size batch=0 of mla_decode must be at least 1"),
        ("batch=-1 ctx=4", "size batch=-1 of mla_decode must be at least 1"),
        ("batch=1", "mla_decode needs ctx; sizes: batch, ctx, heads"),
        ("batch=1 ctx=9..3", "length '9..3' must be at least 1 and rise from low to high"),
        ("batch=1 ctx=0", "length '0' must be at least 1"),
        ("batch=1 ctx=a..b", "'a..b'"),
        ("batch=1 ctx=4 m=3", "unknown size 'm' for mla_decode; sizes: batch, ctx, heads"),
        ("batch=one ctx=4", "size batch='one' of mla_decode is not a whole number"),
        ("batch=1.5 ctx=4", "size batch='1.5' of mla_decode is not a whole number"),
        ("batch=1 batch=2 ctx=4", "size 'batch' stands twice"),
        ("batch=1, ctx=4", "cannot read 'batch=1,' in case 'batch=1, ctx=4'; write name=value"),
        ("batch ctx=4", "cannot read 'batch' in case"),
        ("batch=1 ctx=4 kv=fp9", "size kv='fp9' of mla_decode must be bf16 or fp8"),
        ("batch=1 ctx=4 heads=0", "size heads=0 of mla_decode must be at least 1"),
    ],
)
def test_an_impossible_case_is_one_line(mistake, tmp_path, case, wanted):
    assert wanted in mistake("run", "--op", "mla_decode", "--out", tmp_path / "run", "--case", case)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["lost"], "No such command 'lost'"),
        (["list", "kernel"], "'kernel' is not one of 'ops', 'impls'"),
        (["list", "--op", "mla"], "unknown op 'mla'; ops: "),
        (["list", "cases", "--suite", "r2"], "unknown suite 'r2'; suites: smoke"),
        (["list", "--platform", "tpu"], "'tpu' is not one of 'cuda', 'rocm', 'cpu'"),
        (["list", "--arch", "gfx942"], "--arch needs --platform"),
        (["list", "--json", "/proc/no/rows.json"], "cannot write /proc/no/rows.json: No such file"),
        (["doctor", "--json", "/proc/no/facts.json"], "cannot write /proc/no/facts.json: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_elsewhere_is_one_line(cli, arguments, wanted):
    assert wanted in error_line(cli(*arguments))


def test_without_a_command_it_says_what_there_is(cli):
    done = cli()
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "which is not a Python file"),
        ("def (", "cannot import .*plugin.py, named by KERNEL_BENCH_PLUGINS: invalid syntax"),
        ("import no_such_library", "No module named 'no_such_library'"),
        ("raise ImportError('two\\nlines')", "KERNEL_BENCH_PLUGINS: two lines"),
        ("assert False", "KERNEL_BENCH_PLUGINS: AssertionError"),
        (PLUGIN.replace("elsewhere.kernel", "torch.sdpa"), "two implementations .* are called torch.sdpa"),
    ],
)
@pytest.mark.parametrize("command", [("list",), ("run", "--op", "mla_decode")])
def test_a_plugin_that_cannot_be_used_is_one_line(cli, tmp_path, command, text, wanted):
    plugin = tmp_path / "plugin.py"
    if text is not None:
        plugin.write_text(text)
    out = ("--out", tmp_path / "run") if command[0] == "run" else ()
    done = cli(*command, *out, KERNEL_BENCH_PLUGINS=plugin, PYTHONDONTWRITEBYTECODE=1)
    assert re.search(wanted, error_line(done))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--json", "--csv"])
@pytest.mark.parametrize("where", ["/proc/no/file", "missing/file", "file/file", "."])
def test_an_output_that_cannot_be_written_is_known_before_measuring(cli, tmp_path, option, where):
    (tmp_path / "file").write_text("as it was")
    target = tmp_path / where
    done = cli("run", "--op", "mla_decode", *TINY, "--out", tmp_path / "run", option, target)
    assert f"cannot write {target}: " in error_line(done)
    assert contents(tmp_path) == {"file": b"as it was"}


def test_what_was_in_an_output_stays_until_there_is_a_new_one(cli, tmp_path):
    (tmp_path / "found.json").write_text("as it was")
    done = cli("run", "--op", "mla_decode", "--case", "x", "--json", tmp_path / "found.json")
    error_line(done)
    assert contents(tmp_path) == {"found.json": b"as it was"}


@pytest.fixture
def read_only(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir()
    mount = [shutil.which("mount") or "false", "-t", "tmpfs", "-o", "ro", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a read-only disk here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("where", ["/proc/no/run", "file", "file/run"])
def test_a_folder_that_cannot_be_written_to_is_one_line(cli, tmp_path, where):
    (tmp_path / "file").write_text("as it was")
    out = tmp_path / where
    done = cli("run", "--op", "mla_decode", *TINY, "--out", out)
    assert re.fullmatch(f"cannot write results to {out}: .*; choose another --out", error_line(done))
    assert contents(tmp_path) == {"file": b"as it was"}


def test_a_read_only_disk_is_one_line(cli, read_only):
    done = cli("run", "--op", "mla_decode", *TINY, "--out", read_only / "run")
    assert "Read-only file system; choose another --out" in error_line(done)


# A run and its outputs


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
        *("--out", place / "run", "--json", "-", "--csv", place / "cells.csv"),
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
        assert (cell["status"], cell["reason"]) == ("ok", "")
        assert 0 < cell["low_us"] <= cell["time_us"] <= cell["high_us"]
        assert cell["tflops"] > 0
        assert cell["gbps"] > 0
        assert cell["percent_of_ceiling"] > 0
        assert cell["check"]["ok"]
        assert cell["kernels"]
        assert cell["setup_s"] > 0
        assert set(cell["samples"]["block"]) == set(range(5))
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


def test_a_finished_run_can_be_printed_again(cli, finished, place):
    """Resuming what is finished measures nothing; outputs are those of the whole run."""
    before = contents(place)
    plugin = {"KERNEL_BENCH_PLUGINS": place / "plugin.py"}
    again = cli("run", "--resume", place / "run", "--json", "-", **plugin)
    assert again.returncode == 0
    assert strict(again.stdout) == strict(finished.stdout)
    table = cli("run", "--resume", place / "run", "--csv", "-", **plugin)
    assert list(csv.DictReader(io.StringIO(table.stdout))) == list(
        csv.DictReader((place / "cells.csv").open())
    )
    assert contents(place) == before


def test_nothing_could_run(tmp_path, monkeypatch):
    """The same in this process, where vLLM can be taken away."""
    installed = kernels.platform.version
    monkeypatch.setattr("kernels.platform.version", lambda name: None if name == "vllm" else installed(name))
    request = run_command.Request(
        op="mla_decode",
        impl="vllm.*",
        baseline="vllm.amx",
        case=["batch=1 ctx=4"],
        device="cpu",
        out=str(tmp_path / "run"),
        json=str(tmp_path / "found.json"),
        quiet=True,
    )
    assert run_command.run(request) == 3
    cells = strict((tmp_path / "found.json").read_text())["cells"]
    assert {cell["impl"] for cell in cells} == {"vllm.amx", "vllm.vec"}
    assert {cell["status"] for cell in cells} == {"unsupported"}
    assert all(cell["reason"] for cell in cells)


def test_without_vllm_its_kernels_say_so(monkeypatch):
    monkeypatch.setattr("kernels.platform.version", lambda name: None if name == "vllm" else "1")
    platform = Platform("cpu", "x86-amx", features=frozenset({"avx512f", "amx_bf16", "amx_tile"}))
    for impl in kernels.implementations("mla_decode"):
        if impl.provider == "vllm":
            assert impl.available(platform).reason.startswith("vllm is not installed; pip install")


def test_a_run_is_not_written_over(cli, finished, place):
    before = contents(place / "run")
    done = cli("run", "--op", "mla_decode", *TINY, "--out", place / "run")
    assert re.search("already holds a run; choose another --out, or --resume ", error_line(done))
    assert contents(place / "run") == before


def test_a_device_is_measured_by_one_run_at_a_time(cli, tmp_path):
    with device_lock(detect("cpu")):
        done = cli("run", "--op", "mla_decode", *TINY, "--out", tmp_path / "run")
    assert f"device cpu is being measured by process {os.getpid()}; " in error_line(done, code=3)
    assert contents(tmp_path) == {}


def test_a_lock_that_cannot_be_had_is_one_line(cli, tmp_path):
    """Another user's lock file in a shared /tmp, say."""
    (tmp_path / "deepseek-kernel-bench-cpu.lock").mkdir()
    done = cli("run", "--op", "mla_decode", *TINY, "--out", tmp_path / "run", TMPDIR=tmp_path)
    assert "cannot lock device cpu: " in error_line(done, code=3)
    assert contents(tmp_path) == {}


def test_nothing_but_the_lock_is_left_in_the_temporary_folder(finished, place):
    left = [p.name for p in (place / "tmp").glob("*kernel-bench*")]
    assert left == ["deepseek-kernel-bench-cpu.lock"]


# --resume


def refused(cli: Any, *arguments: object, **variables: object) -> str:
    done = cli("run", "--resume", *arguments, **variables)
    return error_line(done)


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


def test_resume_of_what_is_not_there(cli, tmp_path):
    line = refused(cli, tmp_path / "nowhere")
    assert line == f"cannot read {tmp_path / 'nowhere' / 'run.json'}: No such file or directory"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("keep", [0, 1, 20, 300, -10])
def test_resume_of_a_truncated_run(cli, copied, keep):
    text = (copied / "run.json").read_text()
    (copied / "run.json").write_text(text[:keep])
    assert f"cannot read {copied / 'run.json'}: " in refused(cli, copied)


def test_resume_of_a_broken_journal(cli, copied, place):
    with (copied / "cells.jsonl").open("r+b") as file:
        file.write(b"{broken")
    line = refused(cli, copied, KERNEL_BENCH_PLUGINS=place / "plugin.py")
    assert f"cannot read {copied / 'cells.jsonl'}, line 1: " in line


def test_resume_of_a_newer_schema(cli, copied):
    edit(copied, "schema_version", value=SCHEMA + 1)
    assert re.search(rf"has schema {SCHEMA + 1}; .* reads up to {SCHEMA}\b", refused(cli, copied))


def test_resume_of_an_op_or_kernel_that_is_not_here(cli, copied):
    assert re.search("elsewhere.kernel, which is not here; set KERNEL_BENCH_PLUGINS", refused(cli, copied))
    edit(copied, "op", value="mla_encode")
    assert "unknown op 'mla_encode'; ops: " in refused(cli, copied)


@pytest.mark.parametrize("value", [{}, {"machine": {}, "versions": {}}, {"machine": 3, "versions": 4}])
def test_resume_of_a_run_without_its_provenance(cli, copied, place, value):
    edit(copied, "provenance", value=value)
    line = refused(cli, copied, KERNEL_BENCH_PLUGINS=place / "plugin.py")
    assert line == f"cannot read {copied / 'run.json'}: its provenance is not whole"


@pytest.mark.parametrize(
    ("group", "name"),
    [("machine", "device"), ("machine", "arch"), ("machine", "driver"), ("versions", "torch")],
)
def test_resume_elsewhere_is_refused(cli, copied, place, group, name):
    edit(copied, "provenance", group, name, value="another")
    line = refused(cli, copied, KERNEL_BENCH_PLUGINS=place / "plugin.py")
    assert re.fullmatch(f"{copied} was measured with {name} another; here it is .*: start a new run", line)


def test_resume_with_a_library_less_or_more_is_refused(cli, copied, place):
    edit(copied, "provenance", "versions", "aiter", value="1.0")
    line = refused(cli, copied, KERNEL_BENCH_PLUGINS=place / "plugin.py")
    assert "was measured with aiter 1.0; here it is None" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("--impl", "torch.*"),
        ("--case", "batch=1 ctx=4"),
        ("--suite", "smoke"),
        ("--out", "x"),
        ("--set", "A=1"),
    ],
)
def test_resume_with_another_plan_is_refused(cli, copied, arguments):
    assert f"leave out {arguments[0]}" in refused(cli, copied, *arguments)


def test_resume_as_another_op_is_refused(cli, copied):
    assert f"{copied} is a run of mla_decode, not fused_moe" in refused(cli, copied, "--op", "fused_moe")
