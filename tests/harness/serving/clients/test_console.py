"""Console blocks: every value, which client, and what pasting does to them."""

from __future__ import annotations

import re

import pytest

from harness.serving.clients.files import UnreadableError
from tests.support.serving_files import DATA, of, rules, shapes, written

VLLM = (DATA / "console_vllm.txt").read_text()
SGLANG = (DATA / "console_sglang.txt").read_text()
MOAI = (DATA / "console_moai.txt").read_text()
BLOCK = VLLM[VLLM.index("====") : VLLM.rindex("====") + 4]


def test_every_value_of_a_vllm_block():
    (run,) = of("console_vllm.txt")
    assert run.client == "vllm.serve.console"
    assert (run.engine, run.model, run.mode, run.gpus) == ("", "", "online", None)
    assert run.workload.concurrency == 16
    assert run.workload.request_rate is None
    assert run.totals.model_dump() == {
        "duration_s": 274.44, "completed": 960, "failed": 0, "input_tokens": 219140, "output_tokens": 288000,
    }  # fmt: skip
    assert shapes(run) == {
        ("request_throughput", "total", "none"): (3.5, "req/s", "instance"),
        ("throughput", "total", "output"): (1049.39, "tok/s", "instance"),
        ("peak_throughput", "max", "output"): (1297.0, "tok/s", "instance"),
        ("peak_concurrency", "max", "none"): (32.0, "1", "instance"),
        ("throughput", "total", "total"): (1847.88, "tok/s", "instance"),
        ("ttft", "mean", "none"): (233.84, "ms", "request"),
        ("ttft", "median", "none"): (229.53, "ms", "request"),
        ("ttft", "p99", "none"): (375.31, "ms", "request"),
        ("tpot", "mean", "none"): (14.51, "ms", "request"),
        ("tpot", "median", "none"): (14.50, "ms", "request"),
        ("tpot", "p99", "none"): (16.22, "ms", "request"),
        ("itl", "mean", "none"): (14.51, "ms", "request"),
        ("itl", "median", "none"): (14.56, "ms", "request"),
        ("itl", "p99", "none"): (17.07, "ms", "request"),
    }
    assert run.extra == {}
    assert run.findings == ()


def test_every_value_of_an_sglang_block_and_its_command():
    (run,) = of("console_sglang.txt")
    assert run.client == "sglang.bench_serving.console"
    assert (run.engine, run.model) == ("sglang", "mistralai/Ministral-3-14B-Instruct-2512")
    asked = run.workload
    assert (asked.dataset, asked.concurrency, asked.request_rate, asked.num_prompts) == ("random", 1, 0, 10)
    # The client draws lengths from 1 to 1000 here; the block's own means are 610 and 422.
    assert (asked.input_len, asked.output_len) == (500.5, 500.5)
    assert any("lengths" in note for note in run.notes)
    assert run.totals.model_dump() == {
        "duration_s": 65.08, "completed": 10, "failed": None, "input_tokens": 6101, "output_tokens": 4220,
    }  # fmt: skip
    values = shapes(run)
    assert values[("throughput", "total", "input")] == (93.75, "tok/s", "instance")
    assert values[("throughput", "total", "output")] == (64.84, "tok/s", "instance")
    assert values[("throughput", "total", "total")] == (158.59, "tok/s", "instance")
    assert values[("peak_throughput", "max", "output")] == (151.0, "tok/s", "instance")
    assert values[("concurrency", "mean", "none")] == (1.0, "1", "instance")
    assert values[("e2e", "mean", "none")] == (6505.51, "ms", "request")
    assert values[("e2e", "median", "none")] == (3037.37, "ms", "request")
    assert values[("itl", "p95", "none")] == (6.75, "ms", "request")
    assert values[("itl", "max", "none")] == (8.45, "ms", "request")
    assert len(values) == 20
    assert run.extra == {
        "total generated tokens (retokenized)": "4218",
        "total input text tokens": "6101",
        "total input vision tokens": "0",
    }


def test_a_block_broken_off_gives_what_is_there_and_says_so():
    (run,) = of("console_sglang_old.txt")
    assert run.client == "sglang.bench_serving.console"
    assert rules(run) == ["truncated", "completed"]  # 1648 of 3000
    assert run.workload.concurrency is None  # `not set`
    assert (run.workload.num_prompts, run.totals.completed) == (3000, 1648)
    assert run.value("e2e", "median") == 81160.44
    assert run.value("ttft", "mean") == 44294.8
    assert run.value("ttft", "median") is None


def test_a_tensorrt_llm_block():
    (run,) = of("console_trtllm_serve.txt")
    assert (run.client, run.engine) == ("tensorrt_llm.serve.console", "tensorrt-llm")
    assert run.metric("throughput_per_user").model_dump() == {
        "name": "throughput_per_user", "value": 623.08, "unit": "tok/s", "scope": "request",
        "tokens": "output", "statistic": "mean", "derived": "", "label": "",
    }  # fmt: skip
    assert run.value("throughput", tokens="total") == 1245.12
    assert run.value("e2e", "p99") == 1643.44
    assert run.extra == {"mean request ar": "0.9980", "median request ar": "0.9980"}


# Warm-up, cool-down, duration, completed, tokens in and out, rate, throughput out and total, mean TTFT, ITL.
MOAI_ROWS = [
    (120, 70, 115.83, 4333, 2218496, 7667539, 140, 66194.80, 85347.35, 1677.87, 160.33),
    (130, 70, 110.69, 3186, 1631232, 7161008, 140, 64695.10, 79432.24, 1774.90, 164.32),
    (140, 110, 367.34, 11856, 11856000, 22712445, 80, 61828.90, 94103.87, 1802.87, 172.16),
    (150, 120, 353.35, 10931, 10931000, 21702425, 80, 61418.55, 92353.63, 2149.80, 173.63),
    (300, 230, 895.61, 11906, 23812000, 45844389, 48, 51187.87, 77775.33, 2567.87, 208.59),
    (260, 240, 948.19, 12254, 24508000, 48255768, 60, 50892.65, 76739.86, 5586.34, 208.76),
    (30, 20, 367.68, 185577, 371154000, 19772555, 1500, 53776.62, 1063226.66, 1079.36, 191.71),
]


def test_moais_blocks():
    runs = of("console_moai.txt")
    assert [
        (
            run.workload.warmup_s, run.workload.cooldown_s, run.totals.duration_s, run.totals.completed,
            run.totals.input_tokens, run.totals.output_tokens, run.workload.request_rate,
            run.value("throughput", tokens="output", scope="instance"),
            run.value("throughput", tokens="total", scope="instance"),
            run.value("ttft", "mean"), run.value("itl", "mean"),
        )
        for run in runs
    ] == MOAI_ROWS  # fmt: skip
    for run in runs:
        assert run.client == "moai.serve.console"
        assert run.workload.concurrency == 10800
        assert "wholly inside" in run.notes[0]
        assert run.gpus is None
        assert run.findings == ()
    assert runs[0].extra == {"number of worker processes": "25"}
    assert [runs[0].value("ttft", f"p{n}") for n in (1, 10, 25, 50, 75, 90)] == [
        673.72, 944.53, 1177.09, 1720.09, 2117.51, 2387.32,
    ]  # fmt: skip
    assert runs[3].value("ttft", "p1") is None


PREFIXES = {
    "quoted": "> ",
    "kubernetes": "2026-11-02T10:11:12.123456Z ",
    "python": "INFO 11-02 10:11:12 [serve.py:123] ",
    "worker": "(APIServer pid=4711) ",
    "mpi": "[1,0]<stdout>:",
    "syslog": "Nov 02 10:11:12 host bench[77]: ",
    "bracketed": "[2026-11-02 10:11:12] ",
    "pod": "bench-0 client ",
    "comment": "# ",
    "colour": "\x1b[32m",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_log_prefixes(tmp_path, prefix):
    text = "".join(f"{prefix}{line}\n" for line in BLOCK.splitlines())
    (run,) = written(tmp_path, text)
    (plain,) = of("console_vllm.txt")
    assert shapes(run) == shapes(plain)
    assert run.totals == plain.totals
    assert run.findings == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "'" + text.replace("\n", " \\\n") + "'",
        lambda text: text.replace("274.44", "\x1b[1m274.44\x1b[0m"),
        lambda text: re.sub(r"(\d)(\d{3})\.(\d\d)", r"\1,\2.\3", text).replace("219140", "219,140"),
        lambda text: "Results\n\n| x | y |\n" + text + "\nAs one sees: 12 of 13 are well.\n",
        lambda text: text.replace(":  ", ":\u00a0 "),
        lambda text: text.replace("Mean TPOT", "100%|█████| 960/960 [04:34<00:00]\rMean TPOT"),
        lambda text: text.replace(
            "\nMean ITL", '\nINFO:     127.0.0.1:5 - "POST /v1 HTTP/1.1" 200 OK\nMean ITL'
        ),
        lambda text: text.replace("233.84    ", "233.84    (bad)"),
    ],
)
def test_what_pasting_does(tmp_path, change):
    (run,) = written(tmp_path, change(BLOCK))
    (plain,) = of("console_vllm.txt")
    assert shapes(run) == shapes(plain)
    assert run.totals == plain.totals
    assert run.findings == ()


def test_utf16_and_a_markdown_file(tmp_path):
    assert len(written(tmp_path, VLLM, "issue.md", "utf-16")) == 1


def test_two_blocks_glued_together(tmp_path):
    other = BLOCK.replace("1049.39", "999.99")
    for between in ("\n", "", "\n\nand now\n"):
        first, second = written(tmp_path, BLOCK + between + other)
        assert (first.value("throughput", tokens="output"), second.value("throughput", tokens="output")) == (
            1049.39, 999.99,
        )  # fmt: skip
        assert first.findings == ()
        assert rules(second) == ["throughput"]  # 999.99, which its own totals contradict


def test_two_blocks_whose_border_is_lost(tmp_path):
    """One header, every line twice: neither value is taken."""
    body = BLOCK.split("\n", 1)[1]
    first = body[: body.rindex("====" * 10)].rstrip("=")
    (run,) = written(tmp_path, BLOCK.split("\n", 1)[0] + "\n" + first + body.replace("1049.39", "999.99"))
    assert run.value("throughput", tokens="output") is None
    assert run.value("ttft", "mean") == 233.84  # the same in both
    (finding,) = run.findings
    assert finding.rule == "unreadable"
    assert "1049.39" in finding.message
    assert "999.99" in finding.message


def test_a_header_follows_a_block_broken_off(tmp_path):
    cut = BLOCK[: BLOCK.index("Mean TPOT")]
    first, second = written(tmp_path, cut + "\n" + BLOCK)
    assert rules(first) == ["truncated"]
    assert first.value("tpot") is None
    assert rules(second) == []


def test_numbers_behind_a_block_broken_off_are_not_of_it(tmp_path):
    cut = BLOCK[: BLOCK.index("Mean TPOT")]
    (run,) = written(tmp_path, cut + "\nThe other machine had\nMean TPOT (ms):   99.0\n")
    assert run.value("tpot") is None


def test_a_number_that_the_texts_end_may_have_cut_through(tmp_path):
    (run,) = written(tmp_path, BLOCK[: BLOCK.index("1049.39") + 3])
    assert run.value("throughput", tokens="output") is None
    assert rules(run) == ["unreadable", "truncated"]
    assert "cut through" in run.findings[0].message
    (run,) = written(tmp_path, BLOCK[: BLOCK.index("1049.39") + 7] + "\n")
    assert run.value("throughput", tokens="output") == 1049.39


@pytest.mark.parametrize("cut", range(60, len(BLOCK) - 50, 41))
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


@pytest.mark.parametrize(
    ("text", "left"),
    [("1.049,39", "output token throughput (tok/s)"), ("abc9", "output token throughput (tok/s)"),
     ("9x", "output token throughput (tok/s)"),
     ("-5.0", "output token throughput (tok/s)"), ("nan", "output token throughput (tok/s)")],
)  # fmt: skip
def test_no_numbers(tmp_path, text, left):
    (run,) = written(tmp_path, BLOCK.replace("1049.39", text))
    assert run.value("throughput", tokens="output") is None
    assert run.value("throughput", tokens="total") == 1847.88
    assert all(left in one.message for one in run.findings)
    assert bool(run.findings) == bool(left)


def test_units(tmp_path):
    text = BLOCK.replace("Mean TTFT (ms):                          233.84", "Mean TTFT (s): 0.23384")
    text = text.replace("duration (s):                  274.44", "duration (min): 4.574")
    text = text.replace("Median ITL (ms)", "Median ITL (ticks)")
    (run,) = written(tmp_path, text)
    assert run.value("ttft", "mean") == pytest.approx(233.84)
    assert run.totals.duration_s is None
    assert run.value("itl", "median") is None
    unread = [one.message for one in run.findings if one.rule == "unreadable"]
    assert sorted(message.split("'")[1] for message in unread) == [
        "benchmark duration (min)", "median itl (ticks)",
    ]  # fmt: skip


def test_a_label_that_contains_a_known_one_is_another(tmp_path):
    (run,) = written(tmp_path, BLOCK.replace("Output token throughput", "Steady output token throughput"))
    assert run.value("throughput", tokens="output") is None
    assert run.extra == {"steady output token throughput (tok/s)": "1049.39"}


def test_a_log_that_starts_like_json(tmp_path):
    (run,) = written(tmp_path, "[INFO] the server is up\n{not json\n" + BLOCK)
    assert run.value("throughput", tokens="output") == 1049.39
    with pytest.raises(UnreadableError, match="broken JSON"):
        written(tmp_path, "{not json\n")


def test_a_header_alone_is_no_run(tmp_path):
    with pytest.raises(UnreadableError, match="no run in it"):
        written(tmp_path, "============ Serving Benchmark Result ============\n")


def test_sglangs_offline_block(tmp_path):
    text = (
        "====== Offline Throughput Benchmark Result =======\n"
        "Backend:                                 engine    \n"
        "Successful requests:                     10        \n"
        "Benchmark duration (s):                  2.50      \n"
        "Total input tokens:                      1000      \n"
        "Total generated tokens:                  500       \n"
        "Last generation throughput (tok/s):      33.3      \n"
        "Output token throughput (tok/s):         200.00    \n"
        "==================================================\n"
    )
    (run,) = written(tmp_path, text)
    assert (run.client, run.mode) == ("sglang.bench_offline_throughput.console", "offline")
    assert run.value("throughput", tokens="output") == 200
    assert run.extra == {"last generation throughput (tok/s)": "33.3"}
