"""csrc/kernels/mla/metadata/v1_2_device.cuh and v1_0_device.cuh of v0.1.9, for one query token each.

With one query token the sequential planner is the later one's: its cuts at the end of a sequence concern more
query tokens. There is no parallel one. v1_0 is the later one's line by line.
"""

from __future__ import annotations

import torch

from ._double import plan
from ._double.strict import check


def v1_2(arrays, heads: int, step: int, max_splits: int, fp8: bool, buffers: plan.Buffers) -> None:
    native = heads == 16 or (heads == 128 and fp8)
    ratio = heads // 16 if not native and heads % 16 == 0 else 1
    check(ratio > 1 or heads in (16, 128), "get_mla_metadata_v1_2_device: only supports #heads in [16, 128]")
    p = plan.problem((*arrays, _no_last()), 16 if ratio > 1 else heads, ratio, 1, 1, 1, step, True)
    p.splits = p.clusters if max_splits < 0 else min(p.clusters, max_splits * p.batches)
    total = sum(plan.cdiv(p.key_count(b), step) + 16 for b in range(p.batches))
    buffers.put("reduce_indptr", 0, 0)
    buffers.put("work_indptr", 0, 0)
    plan.sequential(p, plan.cdiv(total, p.splits) + 16, 16, lambda batch: 1, buffers)


def v1_0(arrays, heads: int, step: int, max_splits: int, buffers: plan.Buffers) -> None:
    plan.v1_0((*arrays, _no_last()), heads, step, 1, max_splits, buffers)


def _no_last() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int32)
