"""The workload from the command or the printed arguments before a block, and only where there is no doubt."""

from __future__ import annotations

import pytest

from harness.serving.schema import OfferedLoad
from tests.support.serving_files import DATA, rules, written

TEXT = (DATA / "console_vllm.txt").read_text()
BLOCK = TEXT[TEXT.index("====") : TEXT.rindex("====") + 4] + "\n"
OURS = "vllm bench serve --model m --dataset-name random --random-input-len 228 --random-output-len 300 "
COMMAND = OURS + "--num-prompts 960 --max-concurrency 16\n"
ASKED = OfferedLoad(
    dataset="random", input_len=228, output_len=300, range_ratio=1.0, concurrency=16, num_prompts=960
)


def test_one_command_one_block(tmp_path):
    (run,) = written(tmp_path, "$ " + COMMAND + BLOCK)
    assert run.workload == ASKED
    assert run.model == "m"
    assert "the command" in run.notes[0]


def test_continued_lines_equals_signs_and_a_pipe(tmp_path):
    text = COMMAND.replace(" --", " \\\n  --").replace(
        "--num-prompts 960", "--num-prompts=960 | tee log --seed 7"
    )
    (run,) = written(tmp_path, "```bash\n" + text + "```\n" + BLOCK)
    assert run.workload == ASKED.model_copy(update={"num_prompts": 960})


@pytest.mark.parametrize(
    "text",
    [
        COMMAND + COMMAND + BLOCK,  # which of them
        "we used vllm bench serve for it\n" + BLOCK,  # no command
        COMMAND.replace("--model m", "--model 'm") + BLOCK,  # a quote that nothing closes
    ],
)
def test_doubt_leaves_the_workload_to_the_block(tmp_path, text):
    (run,) = written(tmp_path, text)
    assert run.workload == OfferedLoad(concurrency=16)
    assert run.model == ""
    assert run.notes == ()


def test_one_command_before_two_blocks_may_be_a_loops(tmp_path):
    assert [run.workload.input_len for run in written(tmp_path, COMMAND + BLOCK + BLOCK)] == [None, None]
    assert [run.workload.input_len for run in written(tmp_path, (COMMAND + BLOCK) * 2)] == [228, 228]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--max-concurrency 16", "--max-concurrency 32"), "concurrency is 32"),
        (("--num-prompts 960", "--num-prompts 100"), "960 completed"),
    ],
)
def test_a_command_that_contradicts_its_block(tmp_path, change, said):
    (run,) = written(tmp_path, COMMAND.replace(*change) + BLOCK)
    assert run.workload == OfferedLoad(concurrency=16)
    assert rules(run) == ["command"]
    assert said in run.findings[0].message


def test_bursts_and_a_ramp_are_of_the_load(tmp_path):
    more = " --burstiness 0.5 --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 9"
    (run,) = written(
        tmp_path, COMMAND.replace(" --max-concurrency 16", more + " --max-concurrency 16") + BLOCK
    )
    assert run.workload.burstiness == 0.5
    assert run.workload.ramp_up == "linear from 1 to 9 requests a second"


def test_shell_variables_say_nothing(tmp_path):
    (run,) = written(
        tmp_path,
        COMMAND.replace("16", "$C").replace("228", "${isl}").replace("--model m", "--model $M") + BLOCK,
    )
    assert (run.workload.input_len, run.workload.output_len, run.workload.concurrency) == (None, 300, 16)
    assert run.model == ""
    assert run.findings == ()


def test_lengths_of_another_dataset_are_not_its(tmp_path):
    (run,) = written(tmp_path, COMMAND.replace("--dataset-name random", "--dataset-name sharegpt") + BLOCK)
    assert (run.workload.dataset, run.workload.input_len, run.workload.output_len) == ("sharegpt", None, None)


def test_lengths_of_the_old_script_with_a_ratio_are_not_told(tmp_path):
    text = COMMAND.replace("vllm bench serve", "python3 benchmark_serving.py --random-range-ratio 0.8")
    (run,) = written(tmp_path, text + BLOCK)
    assert (run.workload.input_len, run.workload.range_ratio) == (None, None)
    assert any("left out" in note for note in run.notes)


def test_a_ratio_of_one_means_the_same_in_every_version_of_the_old_script(tmp_path):
    text = COMMAND.replace("vllm bench serve", "python3 benchmark_serving.py --random-range-ratio 1.0")
    (run,) = written(tmp_path, text + BLOCK)
    assert (run.workload.input_len, run.workload.output_len, run.workload.range_ratio) == (228, 300, 1.0)


@pytest.mark.parametrize(("given", "ratio"), [("0.25", 0.6), ("0.0", 1.0), ("1.5", None)])
def test_vllms_ratio_is_of_both_sides_of_the_mean(tmp_path, given, ratio):
    text = COMMAND.replace("serve ", f"serve --random-range-ratio {given} ")
    (run,) = written(tmp_path, text + BLOCK)
    assert (run.workload.input_len, run.workload.range_ratio) == (228, ratio)


def test_sglangs_ratio(tmp_path):
    text = COMMAND.replace("vllm bench serve", "python -m sglang.bench_serving")
    (run,) = written(tmp_path, text + BLOCK)
    assert (run.workload.input_len, run.workload.range_ratio) == ((1 + 228) / 2, 0.0)
    text = COMMAND.replace("vllm bench serve", "python -m sglang.bench_serving --random-range-ratio 0.5")
    (run,) = written(tmp_path, text + BLOCK)
    assert run.workload.range_ratio == 0.5
    assert (run.workload.input_len, run.workload.output_len) == ((114 + 228) / 2, (150 + 300) / 2)


NAMESPACE = (
    "Namespace(backend='vllm', dataset_name='random', model='a/b', num_prompts=960, request_rate=inf, "
    "max_concurrency=16, random_input_len=200, random_output_len=300, random_range_ratio=0.0, "
    "random_prefix_len=28, sonnet_input_len=550, goodput=None, dispatch=<function f at 0x7f>)\n"
)


def test_printed_arguments(tmp_path):
    text = NAMESPACE.replace(", dispatch=<function f at 0x7f>", "")
    for times in (1, 2):
        (run,) = written(tmp_path, COMMAND + text * times + BLOCK)
        assert run.workload == ASKED.model_copy(update={"request_rate": 0.0})
        assert run.model == "a/b"
        assert "arguments printed" in run.notes[0]
    (run,) = written(tmp_path, text + text.replace("=200", "=201") + BLOCK)
    assert run.workload.input_len is None  # two runs' arguments


def test_printed_arguments_that_are_no_python_are_left(tmp_path):
    (run,) = written(tmp_path, NAMESPACE + BLOCK)
    assert run.workload.concurrency == 16
    assert run.findings == ()
