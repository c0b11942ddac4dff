"""TensorRT-LLM's load generators: `trtllm-bench` (its --report_json, and the report that it prints) and
`benchmark_serving.py`.

Read in NVIDIA/TensorRT-LLM, tensorrt_llm/bench/dataclasses/reporting.py and statistics.py (02499765, of 1.3)
and serve/scripts/benchmark_serving.py (0228a712, of 1.3); printed reports of 0.12 to 1.1 in its documents.

trtllm-bench drives the engine without a server: `offline`. All times are ms, the streaming percentiles too;
percentiles are single requests (`sorted[int(n * p)]`), not interpolated. `Output` counts all output tokens,
and so does `Token Throughput` of reports to 0.17. Throughput per GPU is over `world_size`. The printed report
lacks that: there it is total / per GPU, taken where it is a whole number.

benchmark_serving.py is vLLM's old script with `user_throughput` (mean over requests of output tokens /
latency), `e2els` and `avg_decoded_tokens_per_iter`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.serving.clients.console_text import plain, unprefixed
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document
from harness.serving.clients.format import (
    BURSTS,
    COUNTS,
    GOODPUT,
    LOAD,
    REQUESTS,
    Draft,
    Format,
    Latencies,
    One,
    Several,
    keys,
    rates,
)
from harness.serving.schema import ServingRun

STATISTICS = {
    "average": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99", "minimum": "min",
    "maximum": "max",
}  # fmt: skip
SAME = 1e-3  # between a mean and the same mean elsewhere
WHOLE = 1e-3  # how far total / per GPU may be from a whole number, printed with four decimals
ROUNDED = 5e-5  # of a mean printed with four decimals

# Of each latency: where its mean stands alone, and where its distribution.
MEANS = {
    "e2e": ("performance.avg_request_latency_ms", "performance.request_latency_percentiles_ms"),
    "ttft": ("streaming_metrics.avg_ttft_ms", "streaming_metrics.ttft_percentiles"),
    "tpot": ("streaming_metrics.avg_tpot_ms", "streaming_metrics.tpot_percentiles"),
}
DISTRIBUTIONS = {
    "LATENCY": MEANS["e2e"][1], "TTFT": MEANS["ttft"][1], "TPOT": MEANS["tpot"][1],
    "GTPS": "streaming_metrics.gen_tps_percentiles",
}  # fmt: skip
# What stands in the printed report, as in the JSON; each label without its unit.
PRINTED = {
    "Model": "engine.model",
    "TensorRT LLM Version": "engine.version", "TensorRT-LLM Version": "engine.version",
    "Dtype": "engine.dtype", "KV Cache Dtype": "engine.kv_cache_dtype", "Quantization": "engine.quantization",
    "TP Size": "world_info.tp_size", "PP Size": "world_info.pp_size", "EP Size": "world_info.ep_size",
    "Max Runtime Batch Size": "world_info.max_batch_size", "Max Runtime Tokens": "world_info.max_num_tokens",
    "Scheduling Policy": "world_info.scheduling_policy", "Number of requests": "request_info.num_requests",
    "Number of concurrent requests": "request_info.avg_num_concurrent_requests",
    "Average Input Length (tokens)": "request_info.avg_input_length",
    "Average Output Length (tokens)": "request_info.avg_output_length",
    "Request Throughput (req/sec)": "performance.request_throughput_req_s",
    "Total Output Throughput (tokens/sec)": "performance.system_output_throughput_tok_s",
    "Token Throughput (tokens/sec)": "performance.system_output_throughput_tok_s",
    "Total Token Throughput (tokens/sec)": "performance.system_total_throughput_tok_s",
    "Total Latency (ms)": "performance.total_latency_ms",
    "Total Latency (seconds)": "performance.total_latency_s",
    "Average request latency (ms)": "performance.avg_request_latency_ms",
    "Per User Output Throughput [w/ ctx] (tps/user)": "performance.output_throughput_per_user_tok_s",
    "Per User Output Throughput (tokens/sec/user)": "performance.output_throughput_per_user_tok_s",
    "Per GPU Output Throughput (tps/gpu)": "performance.output_throughput_per_gpu_tok_s",
    "Per GPU Output Throughput (tokens/sec/gpu)": "performance.output_throughput_per_gpu_tok_s",
    "Average time-to-first-token [TTFT] (ms)": "streaming_metrics.avg_ttft_ms",
    "Average time-per-output-token [TPOT] (ms)": "streaming_metrics.avg_tpot_ms",
    "Per User Output Speed (tps/user)": "streaming_metrics.token_output_speed_tok_s",
    "Per User Output Speed [1/TPOT] (tokens/sec/user)": "streaming_metrics.token_output_speed_tok_s",
}  # fmt: skip
MARK = re.compile(r"(?:Total Output|(?<!Output )(?<!Total )\bToken) Throughput \(tokens/sec\)")
HEADER = re.compile(r"^= (PYTORCH BACKEND|ENGINE DETAILS)\b")
STATISTIC_LINE = re.compile(r"\[(TPOT|TTFT|GTPS|Latency)\] (\w+)\s*:\s*(\S.*)$")


def report(draft: Draft) -> None:
    """Means that stand apart from their distribution, tokens from mean lengths, and the GPUs."""
    row, totals = draft.row, draft.totals
    printed = row.as_text
    # token_output_speed_tok_s again
    row.inside("streaming_metrics").inside("gen_tps_percentiles").take("average")
    for name, (path, _) in MEANS.items():
        fields, key = row.at(path)
        alone, known = fields.number(key), draft.value(name)
        if alone is not None and known is None:
            draft.add(name, alone, "ms", scope="request", statistic="mean")
        elif alone is not None and known is not None and not math.isclose(alone, known, rel_tol=SAME):
            message = f"{fields.where}: {key!r} is {alone:g}, but the average of its distribution {known:g}"
            draft.row.find("mean", "wrong", message)
    if totals["duration_s"] is None:
        totals["duration_s"] = row.inside("performance").number("total_latency_s")
    requests, count = row.inside("request_info"), totals["completed"]
    for side in ("input", "output"):
        mean = requests.number(f"avg_{side}_length")
        tells = mean is not None and count and not (printed and count * ROUNDED >= 0.5)
        totals[f"{side}_tokens"] = round(mean * count) if tells and mean is not None else None
    if draft.load["output_len"] is None:
        draft.load["output_len"] = row.inside("dataset").number("avg_osl")
    about = draft.about
    about["precision"] = about["precision"] or row.inside("engine").text("dtype")
    about["gpus"] = row.inside("world_info").count("world_size")
    if printed:
        about["client"] += ".console"
        about["gpus"] = about["gpus"] or _gpus(draft)


def _gpus(draft: Draft) -> int | None:
    whole, per_gpu = (draft.value("throughput", "total", "output", scope) for scope in ("instance", "gpu"))
    if not whole or not per_gpu:
        return None
    ratio = whole / per_gpu
    if round(ratio) < 1 or abs(ratio - round(ratio)) > WHOLE:
        message = f"{whole:g} tok/s in all and {per_gpu:g} of a GPU make {ratio:.4g} GPUs"
        draft.find("denominator", "suspect", message)
        return None
    draft.notes.append(f"GPUs: Total Output Throughput / Per GPU Output Throughput = {ratio:.4f}")
    return round(ratio)


def reports(document: Document) -> list[ServingRun]:
    """The runs of the reports printed in a text. A new one begins with its first section, or where a line
    comes for the second time."""
    if not MARK.search(document.text):
        return []
    rows = [Fields(f"{document.path}:{line}", row, as_text=True) for line, row in _reports(document)]
    return [BENCH.run(row) for row in rows]


def _reports(document: Document) -> Iterator[tuple[int, dict[str, Any]]]:
    """(first line, report as the JSON has it)"""
    start, seen = 0, dict[str, str]()
    lines = plain(document.text)
    for number, line in enumerate(lines, 1):
        path, value = _read(line)
        if number == len(lines) and not line[-1:].isspace():
            value += " (where the text ends, maybe cut through)"
        whole = any(where.startswith("performance.") for where in seen)
        if path in seen or (HEADER.match(unprefixed(line)) and whole):
            if whole:
                yield start, _nested(seen)
            start, seen = 0, {}
        if path:
            start = start or number
            seen[path] = value
    if any(where.startswith("performance.") for where in seen):
        yield start, _nested(seen)


def _nested(seen: Mapping[str, str]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for path, value in seen.items():
        *outer, key = path.split(".")
        into = content
        for name in outer:
            into = into.setdefault(name, {})
        into[key] = value
    return content


def _read(line: str) -> tuple[str, str]:
    """(path in the JSON, value) of a line of the report; none: empty."""
    if match := STATISTIC_LINE.search(line.rstrip()):
        return f"{DISTRIBUTIONS[match[1].upper()]}.{match[2].lower()}", match[3]
    parts = unprefixed(line).split(":")
    for i in range(1, len(parts)):
        path = PRINTED.get(" ".join(":".join(parts[:i]).split()), "")
        value = ":".join(parts[i:]).strip()
        if path and value and value != "None":
            return path, value
    return "", ""


def has_throughput(row: Mapping[str, Any]) -> bool:
    performance = row.get("performance")
    mine = keys("system_output_throughput_tok_s output_throughput_per_gpu_tok_s")
    return isinstance(performance, Mapping) and bool(mine & set(performance))


BENCH = Format(
    name="trtllm-bench", is_one=has_throughput,
    metrics=(
        One("performance.system_output_throughput_tok_s", "throughput", "tok/s", "output"),
        One("performance.system_total_throughput_tok_s", "throughput", "tok/s", "total"),
        One("performance.output_throughput_per_gpu_tok_s", "throughput", "tok/s", "output", scope="gpu"),
        One("performance.request_throughput_req_s", "request_throughput", "req/s"),
        *(One(path, name, "tok/s", "output", "mean", "request") for path, name in (
            ("performance.output_throughput_per_user_tok_s", "throughput_per_user"),
            ("streaming_metrics.token_output_speed_tok_s", "generation_speed_per_user"))),
        One("request_info.avg_num_concurrent_requests", "concurrency", "1", statistic="mean"),
        *(Several(path, name, statistics=STATISTICS) for name, (_, path) in MEANS.items()),
        Several(DISTRIBUTIONS["GTPS"], "generation_speed_per_user", "tok/s", "output",
                statistics={key: name for key, name in STATISTICS.items() if name != "mean"}),
    ),
    about={"model": "engine.model", "precision": "engine.quantization", "hardware": "machine.name",
           "version": "engine.version"},
    fixed={"engine": "tensorrt-llm", "mode": "offline"},
    load={"input_len": "request_info.avg_input_length", "output_len": "dataset.osl_stats.average",
          "num_prompts": "request_info.num_requests"},
    totals={"duration_s": "performance.total_latency_ms", "completed": "request_info.num_requests"},
    parallelism={kind: f"world_info.{kind}_size" for kind in ("tp", "pp", "ep")},
    duration_scale=1e-3, odd=report, wanted=("performance",),
)  # fmt: skip


def failed(draft: Draft) -> None:
    """Where it kept no list of requests: those asked for that did not complete."""
    sent, completed = draft.load["num_prompts"], draft.totals["completed"]
    if draft.totals["failed"] is None and sent is not None and completed is not None and completed <= sent:
        draft.totals["failed"] = sent - completed


FORMATS = (
    BENCH,
    Format(
        name="tensorrt_llm.serve", own=keys("user_throughput avg_decoded_tokens_per_iter"), at_least=1,
        metrics=(
            *rates(output_throughput="output", total_token_throughput="total"), REQUESTS, *GOODPUT,
            Latencies({"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}),
            One("avg_decoded_tokens_per_iter.mean", "accept_length", "1", statistic="mean"),
            One("user_throughput", "throughput_per_user", "tok/s", "output", "mean", "request"),
        ),
        about={"date": "date", "model": "model_id"}, fixed={"engine": "tensorrt-llm", "mode": "online"},
        spoken=True, requests="e2els", load=LOAD | BURSTS, totals=COUNTS, odd=failed,
    ),
)  # fmt: skip
