"""Attention of prefill, with heads unpacked from the latents: other kernels for the same operands."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from . import report
from .catalogue import Swap


def apply(swap: Swap) -> None:
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend as Backend

    kernel = {"sdpa": _sdpa, "extend_attention_cpu": _extend}[swap.to]
    dense = Backend._ragged_sdpa

    def _ragged_sdpa(self, q, k, v, q_cu_seq_lens, kv_cu_seq_lens, causal, return_softmax_lse):  # type: ignore[no-untyped-def]
        if not causal or return_softmax_lse:
            return dense(self, q, k, v, q_cu_seq_lens, kv_cu_seq_lens, causal, return_softmax_lse)
        report.called(swap.name)
        return kernel(q, k, v, q_cu_seq_lens.tolist(), self.scale)

    Backend._ragged_sdpa = _ragged_sdpa
    report.note("replaced", swap=swap.name, layers="all")


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], scale: float) -> torch.Tensor:
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=v.dtype)
    for start, end in pairwise(bounds):
        heads = (t[start:end].transpose(0, 1)[None] for t in (q, k, v))
        found = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale)
        out[start:end] = found[0].transpose(0, 1)
    return out


def _extend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], scale: float
) -> torch.Tensor:
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor(bounds[1:]) - starts
    longest = int(lengths.max())
    table = starts[:, None] + torch.arange(longest)
    table = table.clamp_(max=len(q) - 1)
    q, k, v = (t.contiguous() for t in (q, k, v))
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=v.dtype)
    torch.ops._C.extend_attention_cpu(
        q,
        k,
        v,
        out,
        k,
        v,
        table,
        torch.arange(len(starts)),
        lengths,
        lengths,
        starts,
        longest,
        scale,
        0.0,
        False,
        0,
        None,
        None,
        None,
    )
    return out
