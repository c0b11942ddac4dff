"""The node: what include/cudnn_frontend/node/scaled_dot_product_flash_attention.h describes, computed from
pointers, dims, strides and ragged offsets (in elements: test/python/test_sdpa_thd.py)."""

import math
from typing import NamedTuple

import torch

from cudnn._compiled_module import TORCH, cudnnGraphNotSupportedError, data_type

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class Node(NamedTuple):
    qkv: tuple
    scales: tuple  # of q, k, v, s back, s, o; () where nothing is FP8
    attn_scale: object
    lengths: tuple
    bottom_right: bool
    right_bound: int | None
    outputs: list
    stats: bool


def infer(node):
    """Dims of outputs that were not set: o like q with v's width, statistics [b, h, s, 1]."""
    o, stats, *amax = node.outputs
    b, h, s, _ = node.qkv[0].dim
    if not o.dim:
        o.set_dim((b, h, s, node.qkv[2].dim[3]))
    for t in (stats, *amax):
        if not t.dim:
            t.set_dim((b, h, s, 1) if t is stats else (1, 1, 1, 1))
    for t in node.outputs:
        if not t.stride:
            t.set_stride(torch.empty(t.dim, device="meta").stride())


def shapes(node):
    q, k, v = node.qkv
    o, stats, *amax = node.outputs
    b, h, s_q, d_qk = q.dim
    right = (
        k.dim[0] == v.dim[0] == b
        and k.dim[2] == v.dim[2]
        and k.dim[3] == d_qk
        and o.dim == [b, h, s_q, v.dim[3]]
    )
    check(right, "dims of q, k, v and o do not go together")
    check(all(len(t.dim) == len(t.stride) == 4 for t in (q, k, v, o)), "dims and strides have 4 numbers")
    last = all(t.stride[3] == 1 for t in (q, k, v, o))
    check(last, "The stride for the last dimension of q, k, v and o should be 1", cudnnGraphNotSupportedError)
    check(not o.virtual, "o is not an output: set_output(True)")
    check(not node.stats or not stats.virtual, "stats were asked for and are not an output: set_output(True)")
    for t in (t for t in (q, k, v, o, stats) if t.ragged is not None):
        check(t.ragged.dim == [b + 1, 1, 1, 1], "a ragged offset has dims [b + 1, 1, 1, 1]")
        check(t.ragged.type in (data_type.INT32, data_type.INT64), "a ragged offset is INT32 or INT64")
    for t in (t for t in node.lengths[1:] if t is not None):
        check(t.dim == [b, 1, 1, 1] and t.type is data_type.INT32, "seq_len is INT32 [b, 1, 1, 1]")
    for t in node.scales:
        check(t.dim == [1, 1, 1, 1] and t.type is data_type.FLOAT, "a scale is FLOAT [1, 1, 1, 1]")
    for t in (stats, *amax):
        check(t.virtual or t.type is data_type.FLOAT, "statistics and amax are FLOAT")


def run(node, pack):
    q, k, v = node.qkv
    o, stats, amax_s, amax_o = node.outputs
    b, h, s_q, _ = q.dim
    padding, len_q, len_kv = node.lengths
    rows = column(len_q, pack).tolist() if padding else [s_q] * b
    cols = column(len_kv, pack).tolist() if padding else [k.dim[2]] * b
    check(max(rows) <= s_q and max(cols) <= k.dim[2], "a sequence is longer than the graph's dim")
    scale = node.attn_scale  # none given: 1
    scale = (
        1.0 if scale is None else scale if isinstance(scale, (int, float)) else flat(scale, pack)[0].item()
    )
    of_q, of_k, of_v, of_s, to_s, to_o = [flat(t, pack)[0].item() for t in node.scales] or [1.0] * 6
    largest_s = largest_o = 0.0
    for i, (n, m) in enumerate(zip(rows, cols, strict=True)):
        query, key, value = (
            view(t, pack, i, length).float() for t, length in zip((q, k, v), (n, m, m), strict=True)
        )
        key, value = (t.repeat_interleave(h // t.shape[0], 0) for t in (key, value))
        scores = query * of_q @ (key * of_k).transpose(1, 2) * scale
        if node.right_bound == 0:  # bottom right: of the sequence's own lengths
            hidden = torch.arange(m)[None, :] > torch.arange(n)[:, None] + (m - n if node.bottom_right else 0)
            scores = scores.masked_fill(hidden, -math.inf)
        lse = scores.logsumexp(-1, keepdim=True) if m else torch.full((h, n, 1), -math.inf)
        weights = (scores - lse).exp().nan_to_num(0.0)
        if node.scales:
            largest_s = max(largest_s, weights.max().item()) if weights.numel() else largest_s
            weights = narrow(weights * to_s, TORCH[q.type]).float() * of_s
        out = weights @ (value * of_v)
        if node.scales:
            largest_o = max(largest_o, out.abs().max().item()) if out.numel() else largest_o
            out = out * to_o
        view(o, pack, i, n).copy_(narrow(out, TORCH[o.type]))
        if node.stats:
            view(stats, pack, i, n).copy_(lse)
        if o.ragged is None:  # rows of padding are zero where there is room for them
            view(o, pack, i, s_q)[:, n:] = 0
    for t, largest in ((amax_s, largest_s), (amax_o, largest_o)):
        if node.scales and not t.virtual:
            flat(t, pack)[0] = largest


def narrow(t, dtype):
    return t.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype) if dtype in LARGEST else t.to(dtype)


def flat(t, pack):
    """All the elements from a pointer on. Another type than the graph's would be misread: refused."""
    check(t.uid in pack, f"Uid {t.uid} ({t.name}) does not exist in variant pack")
    given = pack[t.uid]
    check(given.dtype == TORCH[t.type], f"{t.name}: {given.dtype} under a pointer to {t.type.name}")
    check(given.data_ptr() % 16 == 0 or given.numel() == 1, f"{t.name}: pointers are aligned to 16 bytes")
    size = given.untyped_storage().nbytes() // given.element_size() - given.storage_offset()
    return given.as_strided((size,), (1,))


def column(t, pack):
    """A tensor [n, 1, 1, 1]: cuDNN is told its stride, as of every tensor (cudnn_interface.h:59)."""
    data, (n, *_), (stride, *_) = flat(t, pack), t.dim, t.stride
    check((n - 1) * stride < len(data), f"illegal memory access: {t.name} beyond its buffer")
    return data.as_strided((n,), (stride,))


def view(t, pack, i, length):
    """Sequence i of a tensor [b, h, s, d], its first `length` rows: [h, length, d]."""
    data = flat(t, pack)
    begin = i * t.stride[0] if t.ragged is None else int(column(t.ragged, pack)[i])
    _, h, _, d = t.dim
    if h * length * d == 0:
        return data[:0].view(h, length, d)
    end = begin + (h - 1) * t.stride[1] + (length - 1) * t.stride[2] + (d - 1) * t.stride[3]
    check(begin >= 0 and end < len(data), f"illegal memory access: {t.name} beyond its buffer")
    return data.as_strided((h, length, d), t.stride[1:], data.storage_offset() + begin)


def check(right, message, kind=RuntimeError):
    if not right:
        raise kind(message)
