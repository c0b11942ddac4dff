"""Attention over rows as a kernel has them at hand: fp32, with the natural log-sum-exp."""

from __future__ import annotations

import torch


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seen: torch.Tensor):
    """q [n, H, D], k [m, H, D], v [m, H, Dv], seen bool [n, m] -> out [n, H, Dv], lse [n, H], both fp32.

    k and v without a head dimension are every head's. A row that sees nothing has output 0 and log-sum-exp
    -inf.
    """
    keys = "khd" if k.dim() == 3 else "kd"
    scores = torch.einsum(f"qhd,{keys}->qhk", q.float(), k.float()) * scale
    scores = scores.masked_fill(~seen[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if k.shape[0] else scores.new_full(scores.shape[:2], float("-inf"))
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    return torch.einsum(f"qhk,{keys}->qhd", weights, v.float()), lse


def bottom_right(queries: int, keys: int) -> torch.Tensor:
    """bool [queries, keys]: the last query sees the last key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def merge(outs: torch.Tensor, lses: torch.Tensor):
    """Splits along dim 0: outs [s, ..., Dv], lses [s, ...] -> out, lse. Where no split saw a key: 0 and +inf
    (csrc/kernels/mla/reduce.cu global_lse)."""
    lse = torch.logsumexp(lses, dim=0)
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    return (torch.exp(lses - lse)[..., None] * outs).sum(0), lse
