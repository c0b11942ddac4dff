"""The files of serving clients. What each of them writes is a table (`Format`), read by one reader; a new
client is one table and one example in tests/data/serving."""

from __future__ import annotations

from harness.serving.clients import aiperf, dstack, guidellm, inference_perf, inferencex, sglang, trtllm, vllm
from harness.serving.clients.console import CONSOLE
from harness.serving.clients.format import Format

FORMATS: tuple[Format, ...] = (
    *aiperf.FORMATS, *guidellm.FORMATS, *inference_perf.FORMATS, *inferencex.FORMATS, *trtllm.FORMATS,
    *sglang.FORMATS, *vllm.FORMATS, *dstack.FORMATS, CONSOLE,
)  # fmt: skip
"""In the order in which a file is asked whose it is: clients that began as a copy of vLLM's write its keys
and their own."""
