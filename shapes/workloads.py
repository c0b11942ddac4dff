"""The serving workloads under which public documents ran DeepSeek-R1.

AMD      "Supercharge DeepSeek-R1 Inference on AMD Instinct MI300X", ROCm blogs, 21 March 2025
dstack   "DeepSeek R1 inference performance: MI300X vs. H200", 18 March 2025; raw numbers in
         github dstackai/benchmarks, branch deepseek-r1-benchmark
MoAI     "DeepSeek R1 671B on AMD MI300X GPUs: Maximum Throughput", Moreh, 2025

"DeepSeek R1 Benchmark Results - MI350X" (vLLM, 1 to 256 requests) does not say how long its prompts were, so
it has no workload here.
"""

from __future__ import annotations

from dataclasses import dataclass

from shapes.attention import Parallel
from shapes.scheduler import Workload


@dataclass(frozen=True)
class Documented:
    workload: Workload
    """The workload of the whole system."""
    parallel: Parallel
    source: str
    """What ran, and which document says so."""
    kv: str = "bf16"
    """The format of the KV cache."""

    @property
    def on_rank(self) -> Workload:
        return self.workload.on_rank(self.parallel.dp)


TP8 = Parallel(tp=8)
MOAI = Parallel(dp=24, ep=8)
"""Three decode nodes of eight data-parallel ranks; the ranks of a node share the experts."""

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)


def documented() -> dict[str, Documented]:
    """Name -> workload: `serving-ISL-OSL-cCONCURRENCY[-mixed]` and `offline-ISL-OSL-bBATCH`."""
    return _prefill_first() | _mixed() | _offline() | _disaggregated()


def _prefill_first() -> dict[str, Documented]:
    found = {}
    for c in CONCURRENCIES:
        workload = Workload(3200, 800, c, 500, token_budget=131_072)
        who = "AMD; dstack" if c >= 4 else "AMD"
        source = f"SGLang, 8x MI300X, chunked prefill 131072, 500 prompts ({who})"
        found[f"serving-3200-800-c{c}"] = Documented(workload, TP8, source)
    for osl in (1600, 3200, 6400):
        workload = Workload(3200, osl, 128, 500)
        source = "SGLang, 8x MI300X, 500 prompts (dstack)"
        found[f"serving-3200-{osl}-c128"] = Documented(workload, TP8, source)
    return found


def _mixed() -> dict[str, Documented]:
    """2048 is the max_num_batched_tokens that vLLM 0.7 set for --enable-chunked-prefill."""
    source = "vLLM, 8x H200, chunked prefill 2048, 500 prompts, KV memory taken as ample (dstack)"
    workloads = {
        c: Workload(3200, 800, c, 500, policy="mixed", token_budget=2048) for c in CONCURRENCIES if c >= 4
    }
    return {f"serving-3200-800-c{c}-mixed": Documented(w, TP8, source) for c, w in workloads.items()}


def _offline() -> dict[str, Documented]:
    """dstack set no limit, so vLLM 0.7 admitted 256 sequences at a time; its tokens per second on MI300X rise
    up to a batch of 256 and stay level above. V0 did not chunk prompts at --max-model-len 32768."""
    batches = {800: (32, 64, 128, 256, 512, 1024), 1600: (256, 512, 1024), 3200: (256, 512, 1024)}
    found = {}
    for osl, sizes in batches.items():
        for b in sizes:
            workload = Workload(3200, osl, b, b, token_budget=32_768, max_running=256, whole_prompts=True)
            running = ", 256 running" if b > 256 else ""
            source = f"vLLM, 8x MI300X, {b} prompts at once{running} (dstack)"
            found[f"offline-3200-{osl}-b{b}"] = Documented(workload, TP8, source)
    return found


def _disaggregated() -> dict[str, Documented]:
    """Requests a second times the mean inter-token latency (ms, ShareGPT runs) are requests a step, so that
    the answers of a batch are at all stages. The document does not give the number of prompts of 2000/100;
    the steady part does not depend on it."""
    runs = (
        (512, 512, 140, 160.33),
        (1000, 1000, 80, 172.16),
        (2000, 2000, 48, 208.59),
        (2000, 100, 1500, 191.71),
    )
    found = {}
    for isl, osl, rate, itl_ms in runs:
        steps = 1000 / (rate * itl_ms)
        workload = Workload(
            isl, osl, 10_800, 32_400, policy="disaggregated", arrival_steps=steps, steady=True
        )
        source = f"24 decode ranks of 40x MI300X, {rate} requests/s, fp8 KV, steady part (MoAI)"
        found[f"serving-{isl}-{osl}-c10800"] = Documented(workload, MOAI, source, kv="fp8")
    return found
