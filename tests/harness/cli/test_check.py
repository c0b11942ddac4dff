"""`check`: one implementation on one case, and on the disk what it was judged by. Mistakes: transcripts/."""

import functools
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import kernels
from harness.run.single import _config
from kernels.op import Reference
from kernels.operands import Seeds
from tests.support.paths import SUPPORT
from tests.support.workers_here import run_here

check_here = functools.partial(run_here, command="check")

PLUGIN = """
from kernels.mla_decode.providers.torch_eager import naive as NaiveMlaDecode

class Doubled(NaiveMlaDecode):
    op = "mla_decode"
    name = "mine.doubled"
    requires = "a test"
    per_size = True  # a plug-in that says so is checked at ragged sizes all the same

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        compute = prepared.call

        def call():
            compute()
            prepared.out[1, :, 4:8] *= 2

        prepared.call = call
        return prepared

class Raises(Doubled):
    name = "mine.raises"

    def prepare(self, operands, out):
        raise RuntimeError("no such luck")
"""
CASE = "batch=3 ctx=5..20"
MINE = ("--op", "mla_decode", "--device", "cpu", "--threads", "1", "--cache", "warm", "--case", CASE)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "mine.py"
    path.write_text(PLUGIN)
    return path


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_wrong_one_is_told_where_and_its_tensors_show_it_without_the_suite(apart, cli, plugin, tmp_path):
    """In this process, and in processes of its own."""
    import torch

    from harness.workers.child.judge import compare_output

    folder = tmp_path / "new" / "folder"
    asked = (*MINE, "--impl", "mine.doubled", "--save", folder)
    done = cli("check", *asked, KERNEL_BENCH_PLUGINS=plugin) if apart else check_here(*asked, plugin=plugin)
    assert done.returncode == 1, done.stderr
    verdict, reason, saved = done.stdout.splitlines()
    assert verdict == f"mla_decode {CASE} heads=16 page=64 kv=bf16 core: mine.doubled is wrong"
    assert reason.startswith("4 of 48 rows are off, in sequence 1, heads 4..7: 2 times the reference;")
    assert saved.startswith(f"saved: {folder}/output.pt, ")

    output, reference, sigma = (torch.load(folder / f"{n}.pt") for n in ("output", "reference", "sigma"))
    assert output.dtype == torch.bfloat16
    assert output.shape == reference.shape == sigma.shape == (3, 1, 16, 512)
    off = ((output - reference).abs() > 10 * sigma).any(-1).nonzero().tolist()
    assert off == [[1, 0, head] for head in range(4, 8)]

    facts = json.loads((folder / "check.json").read_text())
    assert (facts["implementation"], facts["status"], facts["rows"]) == ("mine.doubled", "wrong", None)
    op = kernels.OPS[facts["op"]]
    sizes = op.sizes(facts["sizes"])
    again = op.reference(op.make(sizes, Seeds(**facts["seeds"]), "cpu", facts["boundary"]))
    assert torch.equal(reference, again.value)
    report = compare_output(output, Reference(again.value, again.sigma), op.tolerance(sizes))
    assert (report["row_error"], report["ok"]) == (pytest.approx(facts["report"]["row_error"]), False)
    assert facts["report"]["diagnosis"]["worst"]["at"][0] == 1


def test_a_right_one_writes_the_same_files_when_asked_and_of_other_operands_by_seed(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    done = check_here(*MINE, "--impl", "torch.sdpa")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    assert list(tmp_path.iterdir()) == []
    values = []
    (tmp_path / "traceback.txt").touch()  # of an earlier check
    for seed in (0, 5):
        done = check_here(*MINE, "--impl", "torch.sdpa", "--seed", seed, "--save", tmp_path)
        assert done.returncode == 0 and done.stdout.splitlines()[0].endswith(": torch.sdpa is right")
        values.append(torch.load(tmp_path / "reference.pt"))
    assert not torch.equal(*values)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"output.pt", "reference.pt", "sigma.pt", "check.json"}


def test_a_configuration_is_written_as_names_of_rows_have_it():
    (row,) = (i for i in kernels.implementations("mla_decode") if i.name == "triton.split_kv")
    read = _config(row, "heads=16 shift=-1 swap=True reload=False tile=None kind=a-1 set={[]} dots=...")
    wanted = {"heads": 16, "shift": -1, "swap": True, "reload": False, "tile": None, "kind": "a-1"}
    assert read == wanted | {"set": "{[]}", "dots": "..."}


def test_a_late_stage_is_reached_and_saved_with_its_operands(tmp_path):
    # Under a path of its own: these count their calls, and a process imports a plugin once.
    plugin = shutil.copy(SUPPORT / "failing_kernels.py", tmp_path / "plugin.py")
    done = check_here(*MINE, "--impl", "failing.stale_page_table", "--save", tmp_path, plugin=plugin)
    reason = "with other operands: "
    assert (done.returncode, done.stdout.splitlines()[1][: len(reason)]) == (1, reason)
    facts = json.loads((tmp_path / "check.json").read_text())
    assert facts["seeds"]["stationary"] == 1 and facts["reason"].startswith(reason)


def test_a_run_prints_the_command_of_each_wrong_row_and_what_breaks_ends_with_1_too(plugin, tmp_path):
    options = ("--impl", "mine.doubled,torch.sdpa", "--budget", "1s", "--seed", "3")
    done = run_here(*MINE, *options, "--out", tmp_path / "run", plugin=plugin)
    assert done.returncode == 1, done.stderr
    before, *found = " ".join(done.stdout.split()).split("python -m harness check ")
    assert len(found) == 1
    assert before.endswith("reproduce: ")
    words = shlex.split(found[0].partition(" --save wrong")[0])
    # It was wrong at the run's ragged case already.
    (at,) = re.findall(r"mine.doubled: at (.*?): ", before)
    assert words == [
        *("--op", "mla_decode", "--impl", "mine.doubled", "--case", at),
        *("--cache", "warm", "--device", "cpu", "--seed", "3", "--threads", "1"),
    ]
    again = check_here(*words, plugin=plugin)
    assert (again.returncode, "heads 4..7: 2 times the reference" in again.stdout) == (1, True)
    broken = check_here(*MINE, "--impl", "mine.raises", plugin=plugin)
    assert (
        broken.returncode == 1 and "is error\nmine.py:25 in prepare: RuntimeError: no such" in broken.stdout
    )
