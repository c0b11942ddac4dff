"""Traces made by hand, in torch.profiler's format."""

import json
from pathlib import Path
from typing import Any

from harness.serving.trace import Trace, decompose

MM = "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_TNT"
NORM = "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(x)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"

Event = dict[str, Any]


def event(cat: str, name: str, ts: Any, dur: Any, pid: int = 9, tid: int = 1, **args: Any) -> Event:
    """Times in us."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: Any, dur: Any, *, stream: int = 7, device: int = 0, correlation: int = -1) -> Event:
    args = {"device": device, "stream": stream, "correlation": correlation}
    return event("kernel", name, ts, dur, device, stream, **args)


def launch(correlation: int, ts: float, *, name: str = "cudaLaunchKernel") -> Event:
    return event("cuda_runtime", name, ts, 1, correlation=correlation)


def op(name: str, ts: float, dur: float, *, tid: int = 1, external: int = -1, dims: Any = None) -> Event:
    shapes = {} if dims is None else {"Input Dims": dims}
    return event("cpu_op", name, ts, dur, tid=tid, **{"External id": external} | shapes)


def span(name: str, ts: float, dur: float) -> Event:
    return event("user_annotation", name, ts, dur)


LAYER = [
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 2112u, 7168u, 1u>", 12),
    ("void flash_fwd_splitkv_mla_kernel<__nv_bfloat16>(x)", 40),
    ("void flash_fwd_mla_combine_kernel<__nv_bfloat16>(x)", 6),
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u, 1u>", 10),
    ("fused_moe_kernel", 55),
    (REDUCE, 18),
]
"""Kernels of a layer of DeepSeek in decode, and their us: 141 together."""


def decode_steps(steps: int = 4, layers: int = 3, at: float = 1.7e15, **where: int) -> list[Event]:
    """Steps of layers on one stream, a kernel every us after the last, each launched in its step's span."""
    events, now, call = [], at, 0
    for _ in range(steps):
        events.append(span("execute_context_0(0)_generation_16(16)", now, 20))
        for name, us in LAYER * layers:
            call += 1
            events += [launch(call, now), kernel(name, now + 1, us, correlation=call, **where)]
            now += us + 1
    return events


def text(events: list[Any], **head: Any) -> str:
    return json.dumps({"schemaVersion": 1, **head, "traceEvents": events, "traceName": "x.json"})


def small(folder: Path, raw: str | bytes) -> Path:
    path = folder / "t.json"
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return path


def of(folder: Path, events: list[Any]) -> Trace:
    return decompose(small(folder, text(events)))


def sums(trace: Trace, *, exposed: bool = False) -> dict[str, tuple[float, ...]]:
    """Of each class calls, us and, if wanted, exposed us."""
    return {
        name: (times.calls, times.time_ns / 1e3, times.exposed_ns / 1e3)[: 2 + exposed]
        for name, times in trace.by_class().items()
    }
