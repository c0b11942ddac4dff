"""Files that are not read here, by what they are and what to give instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.serving.clients.files import Document

RECORD = (
    "measure with `vllm bench serve --save-result` or `python -m sglang.bench_serving --output-file` instead"
)
STAGES = "give stage_*_lifecycle_metrics.json or summary_lifecycle_metrics.json"
BY_KEYS: tuple[tuple[frozenset[str], str, str], ...] = tuple(
    (frozenset(keys.split("|")), what, instead)
    for keys, what, instead in (
        (
            "Metric|avg",
            "AIPerf's or genai-perf's CSV",
            "give profile_export_aiperf.json, which stands beside it",
        ),
        (
            "Metric|Value",
            "AIPerf's or genai-perf's CSV",
            "give profile_export_aiperf.json, which stands beside it",
        ),
        (
            "metadata|metrics",
            "AIPerf's profile_export.jsonl, single requests",
            "give profile_export_aiperf.json",
        ),
        ("experiments|service_kind", "genai-perf's raw profile", "give profile_export_genai_perf.json"),
        ("Concurrency|Inferences/Second", "Triton's perf_analyzer", RECORD),
        ("experiment_metadata", "genai-bench's", RECORD),
        ("aggregated_metrics", "genai-bench's", RECORD),
        ("num_concurrent_requests", "LLMPerf's", RECORD),
        ("results_ttft_s_mean", "LLMPerf's", RECORD),
        ("inter_token_latency_s|ttft_s", "LLMPerf's single requests", RECORD),
        ("Time taken for tests (s)", "evalscope's", RECORD),
        ("Number of concurrency", "evalscope's", RECORD),
        ("latency_mode|benchmarks", "llama-benchy's", RECORD),
        ("n_prompt|n_gen", "llama-bench's", RECORD),
        ("conversation_id|ttft_ms", "vLLM's multi_turn benchmark", RECORD),
        ("ttft_ms|tpot_ms|latency_ms", "vLLM's multi_turn benchmark", RECORD),
        ("Type|Name|Request Count", "Locust's", RECORD),
        ("root_group|metrics", "k6's", RECORD),
        ("traceEvents", "a profiler's trace", "`serving trace FILE` takes it apart"),
        ("Kernel_Name|Start_Timestamp", "rocprofv3's kernel trace", "`serving trace FILE` takes it apart"),
        ("results|config|versions", "lm-eval's accuracy", RECORD),
        ("request_latency|request_id", "inference-perf's single requests", STAGES),
        ("prometheus", "inference-perf's Prometheus metrics", STAGES),
    )
)
BY_TEXT = (
    ("MLPerf Results Summary", "MLPerf's loadgen summary", RECORD),
    ("# HELP ", "a server's Prometheus metrics", RECORD),
    ("Benchmarks Stats:", "guidellm's console table", "give benchmarks.json or benchmarks.csv"),
    ("NVIDIA AIPerf", "AIPerf's console table", "give profile_export_aiperf.json"),
    ("LLM Metrics", "AIPerf's or genai-perf's console table", "give profile_export_aiperf.json"),
    ("avg generation throughput", "a server's log", "give what the client wrote or printed"),
    ("gen throughput (token/s)", "a server's log", "give what the client wrote or printed"),
)


def named(document: Document) -> str:
    """What the file is, and what to give instead; empty where that is not known."""
    keys = _keys(document)
    for wanted, what, instead in BY_KEYS:
        if wanted <= keys:
            return f"it is {what}, which is not read: {instead}"
    for mark, what, instead in BY_TEXT:
        if document.kind == "text" and mark.lower() in document.text.lower():
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
