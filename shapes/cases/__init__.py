"""The cases of the suites. Each op has a module with the same functions:

smoke()             cases that take a few seconds on any machine
ragged()            small cases of uneven sizes, at which implementations are checked
sweep(model, parallel, drafts)
                    3200 tokens in, 800 out, each batch once, as in AMD's and dstack's runs
production(model, parallel, drafts)
                    DeepSeek's service, and the sweep's requests, with DP attention
served(model, run)  a documented workload

The last three are called only for an op that holds for the model (not ModelConfig.inapplicable). drafts: the
draft tokens of each request that a decode step verifies, so that a request has 1 + drafts tokens in the step;
0 without speculation. The layers that compute the drafts are left out.

The batch that is served most comes first. The weight of a case is the share of the steps that have it, times
its calls in such a step. The number of layers counts only if it differs between the cases of an op.
"""

from __future__ import annotations

R1 = "deepseek-r1"
ISL, OSL = 3200, 800  # tokens of a request in the sweep: of its prompt, and of its answer
BATCHES = (64, 128, 32, 16, 8, 4, 2, 1)  # the numbers of requests that decode together in the sweep
PROMPTS = ((1, ISL), (4, ISL), (40, ISL))
"""(prompts, tokens of each) that the sweep prefills together; 40 fill the chunk of AMD's runs, 131072."""
CHUNK = 2048  # the max_num_batched_tokens of vLLM 0.7 with chunked prefill

DP_BATCHES = (128, 64, 32, 16)
"""The requests of a rank that decode together with DP attention: its shares of concurrency 1024, 512, 256 and
128 (dstack, H200). 128 is also that of DeepSeek's decode profile (deepseek-ai/profile-data)."""
DP_PROMPTS = ((1, ISL), (4, 4096))
"""The PROMPTS of a rank with DP attention. 4 x 4096 is DeepSeek's prefill profile, 16K tokens on each GPU."""


def decode_text(drafts: int) -> str:
    """`decode`, or `decode with 3 drafts`."""
    if not drafts:
        return "decode"
    return f"decode with {drafts} draft{'s' if drafts > 1 else ''}"


def step_text(tokens: int, prompt: int, drafts: int = 0) -> str:
    """`decode with 3 drafts`, `prefill` or `mixed`: a step of tokens of which `prompt` are prompt tokens."""
    if not prompt:
        return decode_text(drafts)
    return "prefill" if prompt == tokens else "mixed"
