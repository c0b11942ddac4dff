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


def text(events: list[Any], **head: Any) -> str:
    return json.dumps({"schemaVersion": 1, **head, "traceEvents": events, "traceName": "x.json"})


def small(folder: Path, raw: str | bytes) -> Path:
    path = folder / "t.json"
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return path


def of(folder: Path, events: list[Any]) -> Trace:
    return decompose(small(folder, text(events)))
