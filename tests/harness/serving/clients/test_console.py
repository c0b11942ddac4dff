"""Console blocks: what pasting does to them, and the workload from the command before one."""

import re

import pytest

from harness.errors import UnreadableError
from harness.serving.schema import OfferedLoad
from tests.support.serving_files import DATA, look, of, rules, shapes, written

VLLM = (DATA / "console_vllm.txt").read_text()
BLOCK = VLLM[VLLM.index("====") : VLLM.rindex("====") + 4] + "\n"
CUT = BLOCK[: BLOCK.index("Mean TPOT")]


def prefixed(prefix):
    return lambda text: "".join(f"{prefix}{line}\n" for line in text.splitlines())


PREFIXES = ("> ", "# ", "\x1b[32m", "2026-11-02T10:11:12.123456Z ", "INFO 11-02 10:11:12 [serve.py:123] ",
            "(APIServer pid=4711) ", "[1,0]<stdout>:", "Nov 02 10:11:12 host bench[77]: ",
            "[2026-11-02 10:11:12] ", "bench-0 client ")  # fmt: skip
ACCESS = '\nINFO:     127.0.0.1:5 - "POST /v1 HTTP/1.1" 200 OK\nMean ITL'
PASTED = {prefix: prefixed(prefix) for prefix in PREFIXES} | {
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "string": lambda text: "'" + text.replace("\n", " \\\n") + "'",
    "bold": lambda text: text.replace("274.44", "\x1b[1m274.44\x1b[0m"),
    "thousands": lambda text: re.sub(r"(\d)(\d{3})\.(\d\d)", r"\1,\2.\3", text).replace("219140", "219,140"),
    "prose": lambda text: "Results\n\n| x | y |\n" + text + "\nAs one sees: 12 of 13 are well.\n",
    "no-break space": lambda text: text.replace(":  ", ":\u00a0 "),
    "bar": lambda text: text.replace("Mean TPOT", "100%|█████| 960/960 [04:34<00:00]\rMean TPOT"),
    "log": lambda text: text.replace("\nMean ITL", ACCESS),
    "remark": lambda text: text.replace("233.84    ", "233.84    (bad)"),
    "json": lambda text: "[INFO] the server is up\n{not json\n" + text,
}


@pytest.mark.parametrize("change", PASTED.values(), ids=PASTED)
def test_what_pasting_does(tmp_path, change):
    (run,), (plain,) = written(tmp_path, change(BLOCK)), of("console_vllm.txt")
    assert shapes(run) == shapes(plain) and run.totals == plain.totals
    assert run.findings == ()


def test_two_blocks_glued_together_or_without_a_border(tmp_path):
    for between in ("\n", "", "\n\nand now\n"):
        first, second = written(tmp_path, BLOCK + between + BLOCK.replace("1049.39", "999.99"))
        assert [run.value("throughput", tokens="output") for run in (first, second)] == [1049.39, 999.99]
        assert (rules(first), rules(second)) == ([], ["throughput"])  # which its own totals contradict
    # One header, every line twice: neither value is taken, but what is the same in both.
    header, body = BLOCK.split("\n", 1)
    first = body[: body.rindex("====" * 10)].rstrip("=")
    (run,) = written(tmp_path, header + "\n" + first + body.replace("1049.39", "999.99"))
    assert (run.value("throughput", tokens="output"), run.value("ttft", "mean")) == (None, 233.84)
    (finding,) = run.findings
    assert finding.rule == "unreadable" and "1049.39" in finding.message and "999.99" in finding.message


def test_a_block_broken_off(tmp_path):
    first, second = written(tmp_path, CUT + "\n" + BLOCK)
    assert (rules(first), first.value("tpot"), rules(second)) == (["truncated"], None, [])
    (run,) = written(tmp_path, CUT + "\nThe other machine had\nMean TPOT (ms):   99.0\n")
    assert run.value("tpot") is None
    (run,) = written(tmp_path, BLOCK[: BLOCK.index("1049.39") + 3])
    assert run.value("throughput", tokens="output") is None
    assert rules(run) == ["unreadable", "truncated"] and "cut through" in run.findings[0].message


@pytest.mark.parametrize("cut", range(60, len(BLOCK) - 50, 131))
def test_cut_anywhere(tmp_path, cut):
    """What is read of a block cut off is as in the whole: no number that was cut through."""
    (whole,) = of("console_vllm.txt")
    try:
        (run,) = written(tmp_path, BLOCK[:cut])
    except UnreadableError as error:
        assert "\n" not in str(error)
        return
    assert "truncated" in rules(run)
    assert shapes(run).items() <= shapes(whole).items()
    assert {k: v for k, v in run.totals if v is not None}.items() <= dict(whole.totals).items()


# The workload from the command or the printed arguments before a block, only where there is no doubt

COMMAND = (
    "vllm bench serve --model m --dataset-name random --random-input-len 228 --random-output-len 300 "
    "--num-prompts 960 --max-concurrency 16\n"
)
ASKED = OfferedLoad(
    dataset="random", input_len=228, output_len=300, range_ratio=1.0, concurrency=16, num_prompts=960
)
OLD, SGLANG = "python3 benchmark_serving.py", "python -m sglang.bench_serving"
BURSTS = " --burstiness 0.5 --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 9"
LOAD = "workload."


def command(*changes: tuple[str, str]) -> str:
    text = COMMAND
    for old, new in changes:
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(("text", "expected"), [
    ("$ " + COMMAND,
     {"workload": ASKED, "model": "m", "notes": "model and workload from the command before the block"}),
    ("```bash\n" + command((" --", " \\\n  --"), ("s 960", "s=960 | tee log --seed 7")) + "```\n",
     {"workload": ASKED}),
    # Which of two, no command at all, and a quote that nothing closes
    *[(text, {"workload": OfferedLoad(concurrency=16), "model": "", "notes": ""})
      for text in (COMMAND * 2, "we used vllm bench serve for it\n", command(("--model m", "--model 'm")))],
    (command((" 16", BURSTS + " --max-concurrency 16")),
     {LOAD + "burstiness": 0.5, LOAD + "ramp_up": "linear from 1 to 9 requests a second"}),
    (command(("16", "$C"), ("228", "${isl}"), ("--model m", "--model $M")),
     {LOAD + "input_len": None, LOAD + "output_len": 300, LOAD + "concurrency": 16, "model": "",
      "findings": ""}),
    (command(("--dataset-name random", "--dataset-name sharegpt")),
     {LOAD + "dataset": "sharegpt", LOAD + "input_len": None, LOAD + "output_len": None}),
    # The old script's ratio meant another thing in each version, but for 1; vllm's is of both sides.
    (command(("serve ", "serve --disable-tqdm --header Auth=s3cret --ignore-eos ")),
     {"extra.ignore_eos": "on", "extra.header": "***"}),
    (command(("vllm bench serve", OLD)), {LOAD + "input_len": 228, LOAD + "range_ratio": None}),
    (command(("vllm bench serve", OLD + " --random-range-ratio 0.8")),
     {LOAD + "input_len": None, LOAD + "range_ratio": None}),
    (command(("vllm bench serve", OLD + " --random-range-ratio 1.0")),
     {LOAD + "input_len": 228, LOAD + "output_len": 300, LOAD + "range_ratio": 1.0}),
    *[(command(("serve ", f"serve --random-range-ratio {given} ")),
       {LOAD + "input_len": 228, LOAD + "range_ratio": ratio})
      for given, ratio in (("0.25", 0.6), ("0.0", 1.0), ("1.5", None))],
    (command(("vllm bench serve", SGLANG)), {LOAD + "input_len": (1 + 228) / 2, LOAD + "range_ratio": 0.0}),
    (command(("vllm bench serve", SGLANG + " --random-range-ratio 0.5")),
     {LOAD + "range_ratio": 0.5, LOAD + "input_len": (114 + 228) / 2, LOAD + "output_len": (150 + 300) / 2}),
])  # fmt: skip
def test_the_command_before_a_block(tmp_path, text, expected):
    (run,) = written(tmp_path, text + BLOCK)
    assert {what: look(run, what) for what in expected} == expected


def test_a_command_of_two_blocks_or_one_that_contradicts_its_block(tmp_path):
    assert [run.workload.input_len for run in written(tmp_path, COMMAND + BLOCK + BLOCK)] == [None, None]
    assert [run.workload.input_len for run in written(tmp_path, (COMMAND + BLOCK) * 2)] == [228, 228]
    timed = "Warm-up Time: 30\nCool-down Time: 9\nTraffic request rate: 4\nSuccessful"
    for option, other, said in (
        ("max-concurrency", 32, "concurrency is 32 in the command and 16 in the block"),
        ("num-prompts", 100, "960 completed"), ("request-rate", 5, "request_rate is 5 "),
        ("warmup-time", 9, "warmup_s is 9 "), ("cooldown-time", 30, "cooldown_s is 30 "),
    ):  # fmt: skip
        block = BLOCK.replace("Successful", timed, 1)
        (run,) = written(tmp_path, f"{COMMAND.rstrip()} --{option} {other}\n{block}")
        assert run.workload == OfferedLoad(concurrency=16, request_rate=4, warmup_s=30, cooldown_s=9)
        assert "command" in rules(run) and said in run.findings[0].message


NAMESPACE = (
    "Namespace(backend='vllm', dataset_name='random', model='a/b', num_prompts=960, request_rate=inf, "
    "max_concurrency=16, random_input_len=200, random_output_len=300, random_range_ratio=0.0, "
    "random_prefix_len=28, sonnet_input_len=550, goodput=None)\n"
)


def test_printed_arguments(tmp_path):
    for times in (1, 2):
        (run,) = written(tmp_path, COMMAND + NAMESPACE * times + BLOCK)
        assert run.workload == ASKED.model_copy(update={"request_rate": 0.0})
        assert run.model == "a/b" and "arguments printed" in run.notes[0]
    for other in (NAMESPACE + NAMESPACE.replace("=200", "=201"),  # of two runs
                  NAMESPACE.replace("None)", "<function f at 0x7f>)")):  # no Python  # fmt: skip
        (run,) = written(tmp_path, other + BLOCK)
        assert run.workload.input_len is None and run.findings == ()
