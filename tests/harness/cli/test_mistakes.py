"""A user's mistakes: one line each, an exit code, and nothing left behind."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.support.command_line import PLUGIN, TINY, contents, error_line


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
def test_a_mistake_is_one_line(here, tmp_path, arguments, wanted):
    assert re.search(wanted, error_line(here("run", "--out", tmp_path / "run", *arguments)))
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
def test_an_impossible_case_is_one_line(here, tmp_path, case, wanted):
    done = here("run", "--op", "mla_decode", "--out", tmp_path / "run", "--case", case)
    assert wanted in error_line(done)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["lost"], "No such command 'lost'"),
        (["list", "kernel"], "'kernel' is not one of 'ops', 'impls'"),
        (["list", "--op", "mla"], "unknown op 'mla'; ops: "),
        (["list", "cases", "--suite", "r2"], "unknown suite 'r2'; suites: smoke"),
        (["list", "--platform", "tpu"], "'tpu' is not one of 'cuda', 'rocm', 'cpu'"),
        (["list", "--arch", "tpu7"], "the platform of 'tpu7' is not known; name it by --platform"),
        (["list", "--engine", "trt", "--arch", "sm_90"], "unknown engine 'trt'; engines: sglang, vllm"),
        (
            ["list", "--engine", "vllm", "--arch", "sm_70"],
            "no defaults of vllm for 'sm_70'; --arch takes sm_90,",
        ),
        (["list", "--engine", "vllm", "--arch", "sm_90", "--platform", "rocm"], "sm_90 is of platform cuda"),
        (["list", "cases", "--engine", "vllm"], "--engine is for `list impls`, not `list cases`"),
        (["list", "--json", "/proc/no/rows.json"], "cannot write /proc/no/rows.json: No such file"),
        (["doctor", "--quick", "--json", "/proc/no/facts"], "cannot write /proc/no/facts: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_elsewhere_is_one_line(here, arguments, wanted):
    assert wanted in error_line(here(*arguments))


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
def test_an_output_that_cannot_be_written_is_known_before_measuring(here, tmp_path, option, where):
    (tmp_path / "file").write_text("as it was")
    target = tmp_path / where
    done = here("run", "--op", "mla_decode", *TINY, "--out", tmp_path / "run", option, target)
    assert f"cannot write {target}: " in error_line(done)
    assert contents(tmp_path) == {"file": b"as it was"}


def test_what_was_in_an_output_stays_until_there_is_a_new_one(here, tmp_path):
    (tmp_path / "found.json").write_text("as it was")
    done = here("run", "--op", "mla_decode", "--case", "x", "--json", tmp_path / "found.json")
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
def test_a_folder_that_cannot_be_written_to_is_one_line(here, tmp_path, where):
    (tmp_path / "file").write_text("as it was")
    out = tmp_path / where
    done = here("run", "--op", "mla_decode", *TINY, "--out", out)
    assert re.fullmatch(f"cannot write results to {out}: .*; choose another --out", error_line(done))
    assert contents(tmp_path) == {"file": b"as it was"}


def test_a_read_only_disk_is_one_line(here, read_only):
    done = here("run", "--op", "mla_decode", *TINY, "--out", read_only / "run")
    assert "Read-only file system; choose another --out" in error_line(done)
