"""Experiments as files: those that come with the harness, mistakes, what a dry run says."""

from __future__ import annotations

import pytest

from harness.errors import UsageError
from harness.serving.experiment.report import stages_table
from harness.serving.experiment.spec import FILES, read_experiment
from harness.serving.experiment.stages import PLAN, Stages
from tests.support.serving_experiments import TEXT, Doubles, conduct, experiment


@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("*.toml")))
def test_files_that_come_with_the_harness_are_right(name):
    found = read_experiment(name)
    assert found.name == name and found.replay.threads == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("pairs = 3", "pairs = 1", r"tiny\.toml: load\.pairs: .*greater than or equal to 2"),
        ("pairs = 3", "pairs = 1\nrenew = -1", r"load\.pairs: .*to 2 \(and 1 more\)"),
        ("pairs = 3", 'pairs = "many"', r"tiny\.toml: load\.pairs: .*valid integer"),
        ("pairs = 3", "pears = 3", r"tiny\.toml: load\.pears: no such key; allowed: input_len, .*pairs"),
        ('op = "mla_decode"', 'op = "mla"', r"tiny\.toml: swaps\.1\.op: takes one of block_scale_gemm"),
        ('swap = ["mla_decode=torch.naive"]', "", r"tiny\.toml: swaps\.1: says nothing that differs"),
        ('"mla_decode=torch.naive"', '"mla=torch"', r"swaps\.mla\.swap: no 'mla=torch'; swaps: "),
        ('replay = { mla_decode = "vllm.amx" }', "glue = 7", r"swaps\.1\.glue"),
        ('"vllm.onednn"', '"vllm.oneapi"', r"replay\.block_scale_gemm: no implementation 'vllm.oneapi'"),
        ('name = "mla"', 'name = "linears"', "two swaps are called linears"),
        ('name = "mla"', 'name = "base"', r"tiny\.toml: swaps\.1\.name: takes letters"),
        ('name = "tiny"', "", "name: is missing"),
        ('mla_decode = "vllm.vec"\n', "", r"replay\.base\.mla_decode is missing"),
        ("prompts = 4", "prompts = 2", r"load: 2 prompts are never 4 at once"),
        ("pairs = 3", "pairs = ", r"no TOML: .*line 8"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_one_line_that_says_where(tmp_path, old, new, said):
    assert old in TEXT
    with pytest.raises(UsageError, match=said) as error:
        experiment(tmp_path, TEXT.replace(old, new, 1))
    assert "\n" not in str(error.value)


def test_a_recorded_experiment_can_be_made_again(tmp_path):
    asked = experiment(tmp_path).with_pairs(5)
    Stages.begin(tmp_path / "done", asked, resume=False)
    plan = tmp_path / "done" / PLAN
    assert read_experiment(str(plan)) == asked
    for text in ("{", "[]"):
        plan.write_text(text)
        with pytest.raises(UsageError, match=r"experiment\.json: ") as error:
            read_experiment(str(plan))
        assert "\n" not in str(error.value)


def test_what_there_is_not_is_said_with_what_there_is(tmp_path):
    with pytest.raises(
        UsageError, match=r"cannot read nothing: .*cpu-decode, cpu-default, cpu-long, cpu-short"
    ):
        read_experiment("nothing")
    with pytest.raises(UsageError, match="no swap 'x' in experiment tiny; swaps: linears, mla"):
        experiment(tmp_path).swap("x")


def test_a_dry_run_says_what_is_done(tmp_path):
    made = experiment(tmp_path)
    assert "done" not in stages_table(made, tmp_path / "out", ["mla"])
    conduct(tmp_path, Doubles(tmp_path)).run(["mla"])
    text = stages_table(made, tmp_path / "out", ["linears", "mla"])
    assert text.count("done") == 4 and text.count("to do") == 3


def test_an_experiment_begun_under_names_of_old_goes_on(tmp_path):
    """Its replay was said beside the swap, where now it follows from it."""
    said = 'replay = { block_scale_gemm = "vllm.onednn", "block_scale_gemm:kv_b" = "vllm.amx" }\n'
    assert said in TEXT
    made = experiment(tmp_path, TEXT.replace(said, ""))
    assert made.swap("linears").replay == {
        "block_scale_gemm": "vllm.onednn",
        "block_scale_gemm:kv_b": "vllm.amx",
    }
    before = made.model_dump_json().replace("block_scale_gemm=vllm.onednn", "linears=bf16")
    assert "linears=bf16" in before
    (tmp_path / "experiment.json").write_text(before)
    Stages.begin(tmp_path, made, resume=True)
