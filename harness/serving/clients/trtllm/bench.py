"""trtllm-bench: the JSON of `--report_json`, and the report that it prints.

Read in NVIDIA/TensorRT-LLM, tensorrt_llm/bench/dataclasses/reporting.py and statistics.py (02499765, of 1.3).
It drives the engine without a server: `offline`. What the words mean there:

- all times are in ms, the streaming percentiles too, though their keys do not say so; percentiles are single
  requests (`sorted[int(n * p)]`), not interpolated;
- `Output` counts all output tokens, the first too; TPOT is (latency - TTFT) / (tokens - 1) of each request;
- throughput per GPU is over `world_size`. The printed report lacks it: there it is total / per GPU, taken
  where that is a whole number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from harness.serving.clients.common import of_object, single
from harness.serving.clients.console.text import plain, unprefixed
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, objects
from harness.serving.schema import Finding, Metric, OfferedLoad, Parallelism, ServingRun, Totals

NAME = "trtllm-bench"
STATISTICS = {
    "average": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99",
    "minimum": "min", "maximum": "max",
}  # fmt: skip
DISTRIBUTIONS = {"LATENCY": "request_latency_percentiles_ms", "TPOT": "tpot_percentiles",
                 "TTFT": "ttft_percentiles", "GTPS": "gen_tps_percentiles"}  # fmt: skip
# What stands in the printed report, as (object, key) of the JSON.
PRINTED = {
    "Model": ("engine", "model"),
    "TensorRT LLM Version": ("engine", "version"),
    "TensorRT-LLM Version": ("engine", "version"),
    "Dtype": ("engine", "dtype"),
    "KV Cache Dtype": ("engine", "kv_cache_dtype"),
    "Quantization": ("engine", "quantization"),
    "TP Size": ("world_info", "tp_size"),
    "PP Size": ("world_info", "pp_size"),
    "EP Size": ("world_info", "ep_size"),
    "Max Runtime Batch Size": ("world_info", "max_batch_size"),
    "Max Runtime Tokens": ("world_info", "max_num_tokens"),
    "Scheduling Policy": ("world_info", "scheduling_policy"),
    "Number of requests": ("request_info", "num_requests"),
    "Number of concurrent requests": ("request_info", "avg_num_concurrent_requests"),
    "Average Input Length (tokens)": ("request_info", "avg_input_length"),
    "Average Output Length (tokens)": ("request_info", "avg_output_length"),
    "Request Throughput (req/sec)": ("performance", "request_throughput_req_s"),
    "Total Output Throughput (tokens/sec)": ("performance", "system_output_throughput_tok_s"),
    "Total Token Throughput (tokens/sec)": ("performance", "system_total_throughput_tok_s"),
    "Total Latency (ms)": ("performance", "total_latency_ms"),
    "Average request latency (ms)": ("performance", "avg_request_latency_ms"),
    "Per User Output Throughput [w/ ctx] (tps/user)": ("performance", "output_throughput_per_user_tok_s"),
    "Per GPU Output Throughput (tps/gpu)": ("performance", "output_throughput_per_gpu_tok_s"),
    "Average time-to-first-token [TTFT] (ms)": ("streaming_metrics", "avg_ttft_ms"),
    "Average time-per-output-token [TPOT] (ms)": ("streaming_metrics", "avg_tpot_ms"),
    "Per User Output Speed (tps/user)": ("streaming_metrics", "token_output_speed_tok_s"),
}
MARK = "Total Output Throughput (tokens/sec)"
HEADER = re.compile(r"^= (PYTORCH BACKEND|ENGINE DETAILS)\b")
STATISTIC_LINE = re.compile(r"\[(TPOT|TTFT|GTPS|Latency)\] (\w+)\s*:\s*(\S.*)$")
SAME = 1e-3  # between a mean and the same mean elsewhere
WHOLE = 1e-3  # how far total / per GPU may be from a whole number, printed with four decimals


def recognises(document: Document) -> bool:
    rows = document.rows()
    return bool(rows) and all(_is_one(row) for row in rows)


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row), printed=False) for where, row in objects(document)]


def printed(document: Document) -> list[ServingRun]:
    """The runs of the reports printed in a text; see harness/serving/clients/console/blocks.py."""
    if MARK not in document.text:
        return []
    return [
        _run(Fields(f"{document.path}:{line}", row, as_text=True), printed=True)
        for line, row in _reports(document.text)
    ]


def _is_one(row: object) -> bool:
    performance = row.get("performance") if isinstance(row, Mapping) else None
    return isinstance(performance, Mapping) and any(
        key in performance for key in ("system_output_throughput_tok_s", "output_throughput_per_gpu_tok_s")
    )


def _reports(text: str) -> Iterator[tuple[int, dict[str, dict[str, str]]]]:
    """(first line, report as the JSON has it) of each report in a text. A new one begins with its first
    section, or where a line comes for the second time."""
    start = 0
    report: dict[str, dict[str, str]] = {}
    lines = plain(text)
    for number, line in enumerate(lines, 1):
        where, key, value = _read(line)
        if number == len(lines) and not line[-1:].isspace():
            value += " (where the text ends, maybe cut through)"
        again = key and key in report.get(where, {})
        if again or (HEADER.match(unprefixed(line)) and "performance" in report):
            if "performance" in report:
                yield start, report
            start, report = 0, {}
        if key:
            start = start or number
            report.setdefault(where, {})[key] = value
    if "performance" in report:
        yield start, report


def _read(line: str) -> tuple[str, str, str]:
    """(object, key, value) of a line of the report; a statistic's object is that of DISTRIBUTIONS."""
    if match := STATISTIC_LINE.search(line.rstrip()):
        return DISTRIBUTIONS[match[1].upper()], match[2].lower(), match[3]
    parts = unprefixed(line).split(":")
    for i in range(1, len(parts)):
        where, key = PRINTED.get(" ".join(":".join(parts[:i]).split()), ("", ""))
        value = ":".join(parts[i:]).strip()
        if key and value and value != "None":
            return where, key, value
    return "", "", ""


def _run(row: Fields, *, printed: bool) -> ServingRun:
    engine, machine, world = row.inside("engine"), row.inside("machine"), row.inside("world_info")
    requests, performance = row.inside("request_info"), row.inside("performance")
    streaming, dataset = row.inside("streaming_metrics"), row.inside("dataset")
    of = row if printed else streaming
    metrics = [
        *single(performance, "system_output_throughput_tok_s", "throughput", "tok/s", tokens="output"),
        *single(performance, "system_total_throughput_tok_s", "throughput", "tok/s", tokens="total"),
        *single(performance, "output_throughput_per_gpu_tok_s", "throughput", "tok/s", "gpu", "output"),
        *single(performance, "request_throughput_req_s", "request_throughput", "req/s"),
        *_mean(performance, "output_throughput_per_user_tok_s", "throughput_per_user", "tok/s"),
        *_mean(streaming, "token_output_speed_tok_s", "generation_speed_per_user", "tok/s"),
        *_mean(requests, "avg_num_concurrent_requests", "concurrency", "1"),
        *_latency(performance, "avg_request_latency_ms", row if printed else performance, "LATENCY", "e2e"),
        *_latency(streaming, "avg_ttft_ms", of, "TTFT", "ttft"),
        *_latency(streaming, "avg_tpot_ms", of, "TPOT", "tpot"),
    ]
    speeds = of.inside(DISTRIBUTIONS["GTPS"])
    speeds.take("average")  # token_output_speed_tok_s again
    others = {key: name for key, name in STATISTICS.items() if name != "mean"}
    metrics += of_object(speeds, others, "generation_speed_per_user", "tok/s", tokens="output")
    completed = requests.count("num_requests")
    duration = performance.number("total_latency_ms", scale=1e-3)
    into, out = (
        _total(requests, key, completed, printed) for key in ("avg_input_length", "avg_output_length")
    )
    gpus, note = _gpus(world, metrics, printed)
    return ServingRun(
        id=row.where,
        client=f"{NAME}.console" if printed else NAME,
        source=row.where,
        model=engine.text("model"),
        precision=engine.text("quantization") or engine.text("dtype"),
        hardware=machine.text("name"),
        gpus=gpus,
        engine="tensorrt-llm",
        version=engine.text("version"),
        parallelism=Parallelism(
            tp=world.count("tp_size"), pp=world.count("pp_size"), ep=world.count("ep_size")
        ),
        mode="offline",
        workload=OfferedLoad(
            input_len=requests.number("avg_input_length"),
            output_len=dataset.inside("osl_stats").number("average") or dataset.number("avg_osl"),
            num_prompts=completed,
        ),
        totals=Totals(duration_s=duration, completed=completed, input_tokens=into, output_tokens=out),
        metrics=tuple(metrics),
        extra=row.rest(),
        notes=tuple(text for text in (note,) if text),
        findings=tuple(row.findings),
    )


def _mean(fields: Fields, key: str, name: str, unit: str) -> list[Metric]:
    if unit == "1":
        return single(fields, key, name, unit, statistic="mean")
    return single(fields, key, name, unit, "request", "output", "mean")


def _latency(means: Fields, mean: str, parent: Fields, kind: str, name: str) -> list[Metric]:
    """The distribution, or where there is none the mean alone, which stands apart."""
    alone = means.number(mean)
    metrics = of_object(parent.inside(DISTRIBUTIONS[kind]), STATISTICS, name)
    known = next((metric.value for metric in metrics if metric.statistic == "mean"), None)
    if alone is not None and known is not None and not math.isclose(alone, known, rel_tol=SAME):
        message = f"{means.where}: {mean!r} is {alone:g}, but the average of its distribution {known:g}"
        means.findings.append(Finding(rule="mean", severity="wrong", message=message))
    if alone is not None and known is None:
        metrics.append(Metric(name=name, value=alone, unit="ms", scope="request", statistic="mean"))
    return metrics


def _total(requests: Fields, key: str, completed: int | None, printed: bool) -> int | None:
    """Tokens of all requests, from their mean; None where its four printed decimals do not tell."""
    mean = requests.number(key)
    if mean is None or not completed or (printed and completed * 5e-5 >= 0.5):
        return None
    return round(mean * completed)


def _gpus(world: Fields, metrics: list[Metric], printed: bool) -> tuple[int | None, str]:
    stated = world.count("world_size")
    if stated is not None or not printed:
        return stated, ""
    whole, per_gpu = (
        next(
            (
                m.value
                for m in metrics
                if m.name == "throughput" and m.tokens == "output" and m.scope == scope
            ),
            0,
        )
        for scope in ("instance", "gpu")
    )
    ratio = whole / per_gpu if per_gpu else 0
    if round(ratio) < 1 or abs(ratio - round(ratio)) > WHOLE:
        if ratio:
            message = f"{world.where}: {whole:g} tok/s in all and {per_gpu:g} of a GPU make {ratio:.4g} GPUs"
            world.findings.append(Finding(rule="denominator", severity="suspect", message=message))
        return None, ""
    return round(ratio), f"GPUs: Total Output Throughput / Per GPU Output Throughput = {ratio:.4f}"
