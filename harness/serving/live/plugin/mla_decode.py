"""MLA decode over the paged latent cache: another kernel in the same place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from . import report
from .catalogue import Swap

PAGE = 16  # built into mla_decode_kvcache
MIN_WORK_PER_SPLIT = 512  # as vllm/v1/attention/backends/mla/amx_mla.py has them
SPLITS_PER_THREAD = 2


def apply(swap: Swap) -> None:
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    kernel = {
        "decode_attention_cpu": _decode_attention_cpu,
        "mla_decode_kvcache": _mla_decode_kvcache,
        "torch": _torch,
        "torch_padded": _torch_padded,
        "sdpa": _sdpa,
    }[swap.to]

    def forward_mqa(self, q, cache, attn_metadata, layer):  # type: ignore[no-untyped-def]
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q.contiguous()
        report.called(swap.name)
        return kernel(q, cache, attn_metadata, self.scale, self.kv_lora_rank), None

    for owner in (CPUMLAImpl, AMXMLAImpl):
        owner.forward_mqa = forward_mqa
    report.note("replaced", swap=swap.name, layers="all")


def _mla_decode_kvcache(
    q: torch.Tensor, cache: torch.Tensor, metadata: Any, scale: float, latent: int
) -> torch.Tensor:
    decode = metadata.decode
    out = torch.zeros(*q.shape[:2], latent, dtype=q.dtype)
    pages = _once(decode, "pages", lambda: _split(decode.block_table, cache.shape[1], PAGE).int())
    lengths = decode.seq_lens.int()
    torch.ops._C.mla_decode_kvcache(out, q, cache.view(-1, PAGE, q.shape[-1]), scale, pages, lengths)
    return out


def _decode_attention_cpu(
    q: torch.Tensor, cache: torch.Tensor, metadata: Any, scale: float, latent: int
) -> torch.Tensor:
    decode = metadata.decode
    rows = _once(decode, "rows", lambda: _split(decode.block_table, cache.shape[1], 1).int())
    requests = _once(decode, "requests", lambda: torch.arange(len(decode.block_table)))
    lengths = _once(decode, "lengths", lambda: decode.seq_lens.long())
    splits = _once(decode, "splits", lambda: _splits(int(decode.seq_lens.max())))
    flat = cache.view(-1, 1, q.shape[-1])
    out = torch.zeros(*q.shape[:2], latent, dtype=q.dtype)
    partial = torch.zeros(*q.shape[:2], splits, latent + 1)
    torch.ops._C.decode_attention_cpu(
        q,
        flat,
        flat[..., :latent],
        out,
        *(None, None, None),
        partial,
        rows,
        requests,
        lengths,
        scale,
        0.0,
        False,
        0,
        None,
        None,
    )
    return out


# In fp32, as the kernels accumulate: bf16 scores would be another function.
def _torch(q: torch.Tensor, cache: torch.Tensor, metadata: Any, scale: float, latent: int) -> torch.Tensor:
    decode = metadata.decode
    rows = _once(decode, "rows64", lambda: _split(decode.block_table, cache.shape[1], 1).long())
    lengths = _once(decode, "host_lengths", decode.seq_lens.tolist)
    flat = cache.view(-1, q.shape[-1])
    out = torch.empty(*q.shape[:2], latent, dtype=q.dtype)
    for i, length in enumerate(lengths):
        keys = flat[rows[i, :length]].float()
        weights = torch.softmax((q[i].float() @ keys.T) * scale, dim=-1)
        out[i] = weights @ keys[:, :latent]
    return out


def _torch_padded(
    q: torch.Tensor, cache: torch.Tensor, metadata: Any, scale: float, latent: int
) -> torch.Tensor:
    """All requests at once, each as long as the longest: pass by pass what the suite's torch.naive does, so
    that this is the kernel that a replay of it has."""
    decode = metadata.decode
    rows = _once(decode, "rows64", lambda: _split(decode.block_table, cache.shape[1], 1).long())
    longest = _once(decode, "longest", lambda: int(decode.seq_lens.max()))
    absent = _once(decode, "absent", lambda: torch.arange(longest) >= decode.seq_lens[:, None, None])
    keys = cache.view(-1, q.shape[-1])[rows[:, :longest]].float() * 1.0
    scores = q.float() @ keys.transpose(1, 2) * scale
    weights = scores.masked_fill(absent, float("-inf")).softmax(-1)
    return (weights @ keys[..., :latent]).to(q.dtype)


def _sdpa(q: torch.Tensor, cache: torch.Tensor, metadata: Any, scale: float, latent: int) -> torch.Tensor:
    """torch's attention, for which the one latent head is seen as many."""
    decode = metadata.decode
    rows = _once(decode, "rows64", lambda: _split(decode.block_table, cache.shape[1], 1).long())
    lengths = _once(decode, "host_lengths", decode.seq_lens.tolist)
    flat = cache.view(-1, q.shape[-1])
    out = torch.empty(*q.shape[:2], latent, dtype=q.dtype)
    for i, length in enumerate(lengths):
        keys = flat[rows[i, :length]].expand(1, q.shape[1], -1, -1)
        values = keys[..., :latent]
        out[i] = F.scaled_dot_product_attention(q[i][None, :, None], keys, values, scale=scale)[0, :, 0]
    return out


def _split(table: torch.Tensor, page: int, into: int) -> torch.Tensor:
    """A table of pages as one of smaller pages, [B, pages * page / into]."""
    parts = page // into
    return (table.unsqueeze(-1).long() * parts + torch.arange(parts)).reshape(len(table), -1).contiguous()


def _splits(longest: int) -> int:
    ideal = 1
    while ideal < max(1, longest // MIN_WORK_PER_SPLIT):
        ideal *= 2
    return min(ideal, torch.get_num_threads() * SPLITS_PER_THREAD)


def _once(decode: Any, name: str, make: Any) -> Any:
    """Made for the step's first layer, kept on its metadata for the others."""
    name = f"_kernel_bench_{name}"
    if not hasattr(decode, name):
        setattr(decode, name, make())
    return getattr(decode, name)
