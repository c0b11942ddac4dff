"""The files of serving clients, one module for each client's.

A module has NAME, `recognises(document) -> bool` (by keys that only this client writes, never by the file's
name) and `runs(document) -> list[ServingRun]`. Clients that began as a copy of vLLM's write its keys and
their own, so vLLM's is asked last.
"""

from __future__ import annotations

from types import ModuleType

from harness.serving.clients import aiperf, dstack, guidellm, inference_perf, inferencex
from harness.serving.clients.console import blocks
from harness.serving.clients.sglang import offline_throughput, one_batch, one_batch_server, serving
from harness.serving.clients.trtllm import bench, serve
from harness.serving.clients.vllm import latency, throughput
from harness.serving.clients.vllm import serve as vllm_serve

FORMATS: tuple[ModuleType, ...] = (
    aiperf,
    guidellm,
    inference_perf,
    inferencex,
    bench,
    serve,
    serving,
    one_batch,
    one_batch_server,
    offline_throughput,
    throughput,
    latency,
    vllm_serve,
    dstack,
    blocks,
)
