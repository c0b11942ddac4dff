"""Attention problems with their right answers, for the tests of NVIDIA's libraries' doubles."""

import importlib
import math
from types import SimpleNamespace

import torch

from tests.doubles import lent

SCALE = 0.1147  # not the default of any library
MISUSE = (RuntimeError, ValueError, AssertionError, TypeError, AttributeError)


def library(module, *doubles, arch="sm_90"):
    with lent("cuda", arch, *doubles):
        yield importlib.import_module(module)


def decode(lengths, heads, page, s_q=1, dtype=torch.bfloat16, columns=4, seed=0):
    """Latent keys of 576 in scattered pages, NaN where no token stands, and the right answer."""
    g = torch.Generator().manual_seed(seed)
    b, counts = len(lengths), [-(-n // page) for n in lengths]
    width = -(-max(counts) // columns) * columns
    order = torch.randperm(sum(counts) + 3, generator=g).int()
    cache = torch.full((len(order), page, 576), math.nan)
    table = torch.full((b, width), len(order) - 1, dtype=torch.int32)  # padding names a page that is all NaN
    order = order[order != len(order) - 1]
    q = torch.randn(b, s_q, heads, 576, generator=g).to(dtype)
    right, used = torch.empty(b, s_q, heads, 512), 0
    for i, n in enumerate(lengths):
        table[i, : counts[i]] = order[used : used + counts[i]]
        used += counts[i]
        keys = torch.randn(n, 576, generator=g)
        token = torch.arange(n)
        cache[table[i][token // page].long(), token % page] = keys
        keys = keys.to(dtype).float()
        for s in range(s_q):
            seen = n - s_q + s + 1
            weights = (q[i, s].float() @ keys[:seen].T * SCALE).softmax(-1)
            right[i, s] = weights @ keys[:seen, :512]
    used = [table[i, : counts[i]] for i in range(b)]
    return SimpleNamespace(
        q=q,
        cache=cache.to(dtype),
        table=table,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        indptr=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        indices=torch.cat(used),
        right=right,
    )


def prefill(queries, keys, heads=4, dtype=torch.bfloat16, seed=0):
    """Ragged q and k of 192, v of 128; causal to the bottom right."""
    g = torch.Generator().manual_seed(seed)
    total_q, total_k = sum(queries), sum(keys)
    q, k = torch.randn(total_q, heads, 192, generator=g), torch.randn(total_k, heads, 192, generator=g)
    q, k, v = q.to(dtype), k.to(dtype), torch.randn(total_k, heads, 128, generator=g).to(dtype)
    rows = [0, *torch.tensor(queries).cumsum(0).tolist()]
    cols = [0, *torch.tensor(keys).cumsum(0).tolist()]
    right = torch.empty(total_q, heads, 128)
    for i, (n, m) in enumerate(zip(queries, keys, strict=True)):
        scores = torch.einsum(
            "nhd,mhd->hnm", q[rows[i] : rows[i + 1]].float(), k[cols[i] : cols[i + 1]].float()
        )
        hidden = torch.ones(n, m).triu(m - n + 1).bool()
        weights = (scores * SCALE).masked_fill(hidden, -math.inf).softmax(-1)
        right[rows[i] : rows[i + 1]] = torch.einsum("hnm,mhd->nhd", weights, v[cols[i] : cols[i + 1]].float())
    cu = (torch.tensor(rows, dtype=torch.int32), torch.tensor(cols, dtype=torch.int32))
    return SimpleNamespace(
        q=q, k=k, v=v, cu_q=cu[0], cu_k=cu[1], max_q=max(queries), max_k=max(keys), right=right
    )


def close(found, right):
    torch.testing.assert_close(found.float(), right, atol=2e-2, rtol=2e-2)


def differs(found, right):
    return not torch.allclose(found.float(), right, atol=5e-2, rtol=5e-2)


DECODES = [((1,), 16, 1), ((130,), 128, 1), ((64, 1, 100), 16, 1), ((65, 130), 16, 2)]
PREFILLS = [((1, 7, 40), (1, 7, 40)), ((3, 20), (30, 25)), ((1, 1), (9, 40))]
