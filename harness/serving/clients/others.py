"""Files that are not read here, by what they are and what to give instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.serving.clients.files import Document

RECORD = "measure with `vllm bench serve --save-result` or `sglang.bench_serving --output-file` instead"
STAGES = "give stage_*_lifecycle_metrics.json or summary_lifecycle_metrics.json"
BESIDE = "give profile_export_aiperf.json, which stands beside it"
TRACE = "`serving trace FILE` takes it apart"
PRINTED = "give what the client wrote or printed"
# Keys of which a file has all, in any of the sets; or for a text, a line in it.
OTHERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("AIPerf's or genai-perf's CSV", BESIDE, ("Metric|avg", "Metric|Value")),
    ("AIPerf's single requests", BESIDE, ("metadata|metrics",)),
    ("genai-perf's raw profile", "give profile_export_genai_perf.json", ("experiments|service_kind",)),
    ("Triton's perf_analyzer", RECORD, ("Concurrency|Inferences/Second",)),
    ("genai-bench's", RECORD, ("experiment_metadata", "aggregated_metrics")),
    ("LLMPerf's", RECORD, ("num_concurrent_requests", "results_ttft_s_mean", "inter_token_latency_s|ttft_s")),
    ("evalscope's", RECORD, ("Time taken for tests (s)", "Number of concurrency")),
    ("llama-benchy's", RECORD, ("latency_mode|benchmarks", "pp_throughput|tg_throughput")),
    ("llama-bench's", RECORD, ("n_prompt|n_gen",)),
    ("vLLM's multi_turn benchmark", RECORD, ("conversation_id|ttft_ms", "ttft_ms|tpot_ms|latency_ms")),
    ("Locust's", RECORD, ("Type|Name|Request Count",)),
    ("k6's", RECORD, ("root_group|metrics",)),
    ("lm-eval's accuracy", RECORD, ("results|config|versions",)),
    ("inference-perf's single requests", STAGES, ("request_latency|request_id",)),
    ("inference-perf's Prometheus metrics", STAGES, ("prometheus",)),
    ("a profiler's trace", TRACE, ("traceEvents", "Kernel_Name|Start_Timestamp")),
    ("MLPerf's summary", RECORD, ("MLPerf Results Summary",)),
    ("a server's Prometheus metrics", RECORD, ("# HELP ",)),
    ("guidellm's table", "give benchmarks.json or benchmarks.csv", ("Benchmarks Stats:",)),
    ("AIPerf's or genai-perf's table", BESIDE, ("NVIDIA AIPerf", "LLM Metrics")),
    ("a server's log", PRINTED, ("avg generation throughput", "gen throughput (token/s)")),
)


def named(document: Document) -> str:
    """What the file is, and what to give instead; empty where that is not known."""
    keys, text = _keys(document), document.text if document.kind == "text" else ""
    for what, instead, marks in OTHERS:
        if any({*mark.split("|")} <= keys or mark.lower() in text.lower() for mark in marks):
            return f"it is {what}, which is not read: {instead}"
    return ""


def _keys(document: Document) -> set[str]:
    """Of its rows, and of the objects and lists of objects in them."""
    keys = set(document.header)
    for row in document.candidates():
        keys |= set(row)
        for value in row.values():
            inner: Any = value[0] if isinstance(value, list) and value else value
            keys |= set(inner) if isinstance(inner, Mapping) else set()
    return keys
