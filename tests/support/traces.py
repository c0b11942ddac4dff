"""Traces made by hand, in torch.profiler's format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MM = "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_TNT"
NORM = "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(x)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"
MLA = "void flash_fwd_splitkv_mla_kernel<x>(x)"
FLASH = "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<x>>>(x)"
RAGGED = "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<x>(x)"
ARGMAX = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(x)"
)

Event = dict[str, Any]


def kernel(name: str, ts: Any, dur: Any, *, stream: int = 7, device: int = 0, correlation: int = -1) -> Event:
    args = {"device": device, "stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": stream, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def launch(correlation: int, ts: float, *, name: str = "cudaLaunchKernel", tid: int = 1) -> Event:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": 1,
            "args": args}  # fmt: skip


def op(name: str, ts: float, dur: float, *, tid: int = 1, external: int = -1, dims: Any = None) -> Event:
    args = {"External id": external} | ({} if dims is None else {"Input Dims": dims})
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def span(name: str, ts: float, dur: float, *, tid: int = 1) -> Event:
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur}


def text(events: list[Any], **head: Any) -> str:
    return json.dumps({"schemaVersion": 1, **head, "traceEvents": events, "traceName": "x.json"})


def write(folder: Path, events: list[Any], name: str = "trace.json", **head: Any) -> Path:
    path = folder / name
    raw = text(events, **head).encode()
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path
