"""`--help` and `list` as a user meets them."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

import kernels
from harness.report.terminal import WIDTH
from tests.support.command_line import PLUGIN

# Start-up

HEAVY = {"torch", "pandas", "numpy", "scipy", "pydantic", "vllm", "triton", "transformers"}


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
        ["list", "impls", "--engine", "vllm", "--arch", "gfx942"],
        ["list", "ops"],
        ["list", "suites"],
        ["list", "flags"],
        ["list", "recipes"],
        ["list", "cases", "--suite", "smoke"],
        ["doctor", "--quick"],
        ["run", "--no-such-option"],
    ],
    ids=" ".join,
)
def test_what_measures_nothing_imports_nothing_heavy(cli, arguments):
    done = cli(*arguments, PYTHONPROFILEIMPORTTIME=1)
    imported = set(re.findall(r"^import time:.*\|\s*(\w+)", done.stderr, re.MULTILINE))
    assert {"harness", "kernels", "click"} <= imported
    assert not imported & HEAVY
    draws = arguments[:1] == ["list"] and not {"--help", "--json"} & set(arguments)
    assert ("rich" in imported) == draws


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


# list


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("ops", "op"),
        ("impls", "implementation"),
        ("cases", "weight"),
        ("suites", "suite"),
        ("linears", "name"),
    ],
)
def test_list_prints_the_same_rows_as_table_and_json(here, tmp_path, what, name):
    table = here("list", what)
    assert (table.returncode, table.stderr) == (0, "")
    printed = here("list", what, "--json", "-")
    written = here("list", what, "--json", tmp_path / "rows.json")
    assert (written.returncode, written.stdout) == (0, "")
    assert printed.stdout == (tmp_path / "rows.json").read_text()
    rows = json.loads(printed.stdout)
    assert rows
    words = re.split(r"[\s,]+", table.stdout)
    for row in rows:
        wanted = f"{100 * row[name]:.1f}" if name == "weight" else row[name].split()[0]
        assert wanted in words
    assert max(map(len, table.stdout.splitlines())) <= WIDTH


def test_list_begins_with_what_can_run(here):
    table = here("list", "impls").stdout
    rows = json.loads(here("list", "impls", "--json", "-").stdout)
    able = sum(row["runs"] for row in rows)
    assert table.splitlines()[2].startswith(f"{able} of {len(rows)} can run")
    here_first, _, others = table.partition(" cannot: ")
    for row in rows:
        assert re.search(rf"^{row['op']} .*\b{re.escape(row['implementation'])}\b", here_first, re.M) or (
            not row["runs"] and row["implementation"] in others
        )


def test_list_of_an_op_says_what_each_requires(here):
    table = " ".join(here("list", "impls", "--op", "mla_decode").stdout.split())
    rows = json.loads(here("list", "impls", "--op", "mla_decode", "--json", "-").stdout)
    requires = [row["requires"].split()[0] for row in rows if not row["runs"]]
    assert requires
    assert all(word in table for word in requires)


def test_list_cases_says_what_all_of_them_have_once(here):
    table = here("list", "cases", "--suite", "r1-tp8", "--op", "block_scale_gemm").stdout
    assert table.splitlines()[0] == "r1-tp8 block_scale_gemm; all with fp8=e4m3fn scales=fp32"
    assert table.count("fp8=") == 1


@pytest.mark.parametrize(
    ("platform", "arch"),
    [("rocm", "gfx942"), ("rocm", "gfx950"), ("cuda", "sm_90"), ("cuda", "sm_100"), ("cpu", "x86-amx")],
)
def test_list_says_what_runs_on_another_platform_and_why_not(here, platform, arch):
    rows = json.loads(here("list", "impls", "--platform", platform, "--arch", arch, "--json", "-").stdout)
    assert {row["op"] for row in rows} == set(kernels.OPS)
    by_name = {row["implementation"]: row for row in rows}
    assert by_name["torch.sdpa"]["runs"]
    for row in rows:
        assert row["runs"] or row["why not"], f"{row['implementation']} gives no reason"
    if platform != "cpu":
        assert not by_name["vllm.amx"]["runs"]
        assert by_name["vllm.amx"]["why not"] == f"needs cpu; this is {platform} {arch}"
        table = here("list", "impls", "--platform", platform, "--arch", arch).stdout
        assert table.splitlines()[0] == f"{platform} {arch} (not this machine)"
        assert here("list", "impls", "--arch", arch).stdout == table
        assert " cannot: needs cpu\n" in table


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_list_says_what_an_engine_would_run(here, engine):
    """The architecture brings its platform."""
    asked = ("list", "impls", "--engine", engine, "--arch", "gfx942")
    table = here(*asked).stdout
    rows = json.loads(here(*asked, "--json", "-").stdout)
    assert table.splitlines()[0] == "rocm gfx942 (not this machine)"
    assert {row["op"] for row in rows} == set(kernels.OPS)
    assert {row["engine"] for row in rows} == {engine}
    by_name = {row["implementation"]: row for row in rows if row["op"] == "block_scale_gemm"}
    assert by_name["aiter.dispatch"]["runs"] and by_name["aiter.dispatch"]["flags"]
    for row in rows:
        assert row["source"].rpartition("/")[2] in table
        assert (row["implementation"] or "none") in table
        assert row["flags"] in table
    assert "context length of the server, 163840 where a case has no model_len" in table
    assert max(map(len, table.splitlines())) <= WIDTH


def test_list_of_an_engine_takes_one_op_and_another_arch(here):
    asked = ("list", "impls", "--engine", "vllm", "--op", "block_scale_gemm", "--json", "-")
    of = {arch: json.loads(here(*asked, "--arch", arch).stdout) for arch in ("sm_90", "x86-amx")}
    assert of["sm_90"][0]["when"] == ["m < 32"]
    assert {row["implementation"] for row in of["x86-amx"]} == {"vllm.amx", "vllm.amx_unpacked"}
    assert {row["op"] for row in of["sm_90"]} == {"block_scale_gemm"}


def test_list_cases_of_a_suite(here):
    rows = json.loads(here("list", "cases", "--suite", "smoke", "--op", "mla_decode", "--json", "-").stdout)
    assert {row["suite"] for row in rows} == {"smoke"}
    assert sum(row["weight"] for row in rows) == pytest.approx(1, abs=0.01)


def test_list_says_which_library_is_missing(cli, tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    rows = json.loads(cli("list", "impls", "--json", "-", KERNEL_BENCH_PLUGINS=plugin).stdout)
    (row,) = [row for row in rows if row["implementation"] == "elsewhere.kernel"]
    assert not row["runs"]
    assert row["why not"] == "no_such_library is not installed; there is none"
