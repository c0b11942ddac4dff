"""The files of serving clients, one module for each client's.

A module has NAME, `recognises(document) -> bool` (by keys that only this client writes, never by the file's
name) and `runs(document) -> list[ServingRun]`. Clients that began as a copy of vLLM's write its keys and
their own, so vLLM's is asked last.
"""

from __future__ import annotations

from types import ModuleType

from harness.serving.formats import (
    aiperf,
    console,
    dstack,
    guidellm,
    inferencex,
    sglang_offline_throughput,
    sglang_one_batch,
    sglang_one_batch_server,
    sglang_serving,
    trtllm_bench,
    trtllm_serve,
    vllm_latency,
    vllm_serve,
    vllm_throughput,
)

FORMATS: tuple[ModuleType, ...] = (
    aiperf,
    guidellm,
    inferencex,
    trtllm_bench,
    trtllm_serve,
    sglang_serving,
    sglang_one_batch,
    sglang_one_batch_server,
    sglang_offline_throughput,
    vllm_throughput,
    vllm_latency,
    vllm_serve,
    dstack,
    console,
)
