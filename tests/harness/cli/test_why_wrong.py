"""`check` and `run` name common bugs of users' kernels of each op, and say where exceptions come from."""

import json

import pytest

from tests.support.mistaken_kernels import OF
from tests.support.paths import SUPPORT
from tests.support.workers_here import run_here

CASES = {
    "mla_decode": "batch=3 ctx=70..300",
    "mha_prefill": "batch=2 new=40..90 prefix=20..60 heads=4",
    "block_scale_gemm": "m=9 n=300 k=600",
    "fused_moe": "tokens=6 experts=8 topk=3 hidden=384 inter=256",
}
MINE = ("--device", "cpu", "--threads", "1", "--cache", "warm")


PLUGIN = SUPPORT / "mistaken_kernels.py"


@pytest.mark.parametrize("op", CASES)
def test_a_bug_is_named(op):
    where = ("--op", op, "--case", CASES[op], *MINE)
    for row, name in OF[op].items():
        assert f": equals: {name}" in run_here(*where, "--impl", row, plugin=PLUGIN, command="check").stdout


def test_a_run_names_the_bugs_of_its_rows(tmp_path):
    where = ("--op", "mla_decode", "--case", CASES["mla_decode"], *MINE)
    out = ("--json", "-", "--out", tmp_path / "run")
    done = run_here(*where, "--impl", "mistaken.*", *out, "--budget", "1s", plugin=PLUGIN)
    assert done.returncode == 1
    cells = {cell["impl"]: cell for cell in json.loads(done.stdout)["cells"]}
    for row, name in OF["mla_decode"].items():
        names = cells[row]["check"]["diagnosis"]["equals"]
        assert name in names and f"equals: {' or '.join(names)}" in cells[row]["reason"]


RAISES = """
from kernels.op import implementation


def helper():
    raise ValueError("my own\\nbug")


@implementation("mine.call", op="mla_decode", requires="a test")
def call(o, out):
    return lambda: helper()


@implementation("mine.triton", op="mla_decode", requires="a test")
def triton(o, out):
    raise RuntimeError("0 active drivers ([]). There should only be one.")


class Silent(Exception):
    def __str__(self):
        raise ValueError("no str")


@implementation("mine.silent", op="mla_decode", requires="a test")
def silent(o, out):
    raise Silent


@implementation("mine.cause", op="mla_decode", requires="a test")
def cause(o, out):
    try:
        helper()
    except ValueError as error:
        raise RuntimeError("outer") from error


@implementation("mine.fits", op="mla_decode", requires="a test", fits=lambda sizes: "yes")
def fits(o, out): ...
"""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("mine.call", "mine.py:6 in helper, mine.py:11 in <lambda>: ValueError: my own bug"),
        ("mine.triton", "mine.py:16 in triton: RuntimeError: Triton runs on a CPU only interpreted: set "),
        ("mine.silent", "mine.py:26 in silent: Silent"),
        (
            "mine.cause",
            "mine.py:34 in cause: RuntimeError: outer, from mine.py:6 in helper, mine.py:32 in cause",
        ),
    ],
)
def test_an_exception_says_where_and_its_traceback_is_saved(row, said, tmp_path):
    (plugin := tmp_path / "mine.py").write_text(RAISES)
    where = ("--op", "mla_decode", "--case", "batch=1 ctx=5", *MINE, "--impl", row)
    run = ("--budget", "1s", "--out", tmp_path / "run")
    for command, options in (("check", ("--save", tmp_path / "wrong")), ("run", run)):
        done = run_here(*where, *options, plugin=plugin, command=command)
        assert done.returncode == 1
        assert said in " ".join(done.stdout.split())
    saved = (tmp_path / "wrong/traceback.txt").read_text()
    assert saved.startswith("Traceback") and f'{plugin}"' in saved
    assert [path.name for path in (tmp_path / "wrong").iterdir()] == ["traceback.txt"]


def test_a_method_that_answers_something_else_is_an_error(tmp_path):
    (plugin := tmp_path / "mine.py").write_text(RAISES)
    where = ("--op", "mla_decode", "--case", "batch=1 ctx=5", *MINE, "--impl", "mine.fits")
    run = ("--budget", "1s", "--out", tmp_path / "run")
    for command, options in (("check", ("--save", tmp_path / "wrong")), ("run", run)):
        done = run_here(*where, *options, plugin=plugin, command=command)
        assert done.returncode == 1
        assert "returned 'yes', where kernels." in " ".join(done.stdout.split())
    assert not (tmp_path / "wrong").exists()


def test_a_folder_of_configurations_that_has_none_is_told(tmp_path, monkeypatch):
    where = ("--op", "mla_decode", "--case", "batch=1 ctx=5", *MINE, "--impl", "torch.sdpa")
    for folder, code, said in (
        (tmp_path, 0, "which holds no "),
        (tmp_path / "none", 2, "which is not a folder"),
    ):
        monkeypatch.setenv("KERNEL_BENCH_TUNED", str(folder))
        done = run_here(*where, command="check")
        assert done.returncode == code and f"names {folder}, {said}" in done.stderr
