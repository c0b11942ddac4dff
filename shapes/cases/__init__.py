"""The cases of the suites. Each op has a module with the same functions:

smoke()             cases that take a few seconds on any machine
ragged()            small cases of uneven sizes, at which implementations are checked
sweep(model, parallel, drafts)
                    3200 tokens in, 800 out, each batch once, as in AMD's and dstack's runs
production(model, parallel, drafts)
                    DeepSeek's service, and the sweep's requests, with DP attention
served(model, run)  a documented workload

The last three have no case of an op that does not hold for the model (ModelConfig.unheld). drafts: the draft
tokens that a decode step verifies for each request, which has 1 + drafts tokens in the step; 0 without
speculation. What computes the drafts, a layer or a few beside the model's, is left out.

The batch that is served most comes first. The weight of a case is the share of the steps that have it, times
its calls in such a step. The number of layers counts only if it differs between the cases of an op.
"""

from __future__ import annotations

R1 = "deepseek-r1"
ISL, OSL = 3200, 800
BATCHES = (64, 128, 32, 16, 8, 4, 2, 1)
PROMPTS = (1, 4, 40)
"""The numbers of prompts that are prefilled together in the sweep; 40 fill SGLang's --chunked-prefill-size
131072."""
CHUNK = 2048
"""The max_num_batched_tokens of vLLM 0.7 with chunked prefill."""

DP_BATCHES = (128, 64, 32, 16)
"""The numbers of requests of a rank that decode together. 128 is that of DeepSeek's decode profile
(deepseek-ai/profile-data), and a rank's share of concurrency 1024; the others are shares of 512, 256 and 128
(dstack, H200)."""
DP_PROMPTS = ((1, ISL), (4, 4096))
"""(prompts, tokens of each) of a rank. 4 x 4096 is DeepSeek's prefill profile, 16K tokens on each GPU."""


def decode(drafts: int) -> str:
    """`decode`, or `decode with 3 drafts`."""
    return f"decode with {drafts} draft{'s' if drafts > 1 else ''}" if drafts else "decode"


def phase(tokens: int, prompt: int, drafts: int = 0) -> str:
    """`decode`, `prefill` or `mixed`: the kind of a step of `tokens` tokens, `prompt` of which are prompt
    tokens."""
    if not prompt:
        return decode(drafts)
    return "prefill" if prompt == tokens else "mixed"
