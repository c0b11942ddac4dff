"""The cases of suites, a file for each op with the same four functions.

smoke()             a few seconds on any machine
sweep(parallel)     3200 tokens in, 800 out, each batch once: AMD's and dstack's runs
production()        DeepSeek's service, and the sweep's requests, under DP attention and expert parallelism
served(run)         a documented workload, weighted by how often its steps occur

The most served batch comes first. A case's weight is the share of the steps that have it times its calls in
such a step; how many layers call it matters only where that differs within an op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapes.attention import Parallel

if TYPE_CHECKING:
    from shapes.models import ModelConfig

R1 = "deepseek-r1"
ISL, OSL = 3200, 800
BATCHES = (64, 128, 32, 16, 8, 4, 2, 1)
"""Requests that decode together in the sweep."""
PROMPTS = (1, 4, 40)
"""Prompts that are prefilled together in the sweep; 40 fill SGLang's --chunked-prefill-size 131072."""
CHUNK = 2048
"""max_num_batched_tokens of vLLM 0.7 with chunked prefill."""

DP_EP8 = Parallel(dp=8, ep=8)
DP_BATCHES = (128, 64, 32, 16)
"""Requests of a rank that decode together. 128: DeepSeek's decode profile (deepseek-ai/profile-data), and a
rank's share of concurrency 1024; the others are shares of 512, 256 and 128 (dstack, H200)."""
DP_PROMPTS = ((1, ISL), (4, 4096))
"""(prompts, tokens of each) of a rank; 4 x 4096: DeepSeek's prefill profile, 16K tokens a GPU."""


def r1() -> ModelConfig:
    from shapes.models import model

    return model(R1)


def phase(tokens: int, prompt: int) -> str:
    """What a step of `tokens` does, of which `prompt` are of prompts: `decode`, `prefill` or `mixed`."""
    if not prompt:
        return "decode"
    return "prefill" if prompt == tokens else "mixed"
