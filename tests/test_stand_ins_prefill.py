"""MHA prefill's adapters that have no double, run against stand-ins with the real entries' arguments.

Weaker than a contract: who wrote the adapter read the source for both. It shows that each of their lines
runs, and that what they hand over means what the signatures say (SGLang 2026)."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from contract_prefill import CASES, IMPLEMENTATIONS, OP
from doubles import lent
from judging import judged

from kernels.operands import Seeds
from shapes.case import parse


def attend(q, k, v, out, cu_q, cu_k, scale, causal):
    """Sequence by sequence, causal to the last key."""
    places = (itertools.pairwise(t.tolist()) for t in (cu_q, cu_k))
    for (a, b), (c, d) in zip(*places, strict=True):
        scores = torch.einsum("nhd,mhd->hnm", q[a:b].float(), k[c:d].float()) * scale
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a) if causal else d)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out[a:b] = torch.einsum("hnm,mhd->nhd", weights, v[c:d].float()).to(out.dtype)


def extend_attention_fwd(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask,
    is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None, logit_cap=0.0,
):  # fmt: skip
    assert custom_mask is None and is_causal and (k_scale, v_scale) == (1.0, 1.0)
    for b in range(len(qo_indptr) - 1):
        new = slice(*qo_indptr[b : b + 2].tolist())
        cached = kv_indices[slice(*kv_indptr[b : b + 2].tolist())]
        k, v = (
            torch.cat([buffer[cached], extend[new]])
            for buffer, extend in ((k_buffer, k_extend), (v_buffer, v_extend))
        )
        assert new.stop - new.start <= max_len_extend
        ends = [torch.tensor([0, len(t)]) for t in (q_extend[new], k)]
        attend(q_extend[new], k, v, o_extend[new], *ends, sm_scale, True)


EXTEND = "sglang.srt.layers.attention.triton_ops.extend_attention"
ENTRIES: list[tuple[str, str, str, str, str, Callable]] = [
    ("sglang.triton_extend", "cuda", "sm_90", "bf16", EXTEND, extend_attention_fwd),
]


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e[0]} {e[3]}")
def test_the_adapter_hands_over_what_the_entry_takes(entry, text, monkeypatch):
    name, kind, arch, dtype, place, stand_in = entry
    parts = place.split(".")
    for length in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(".".join(parts[:length])))
    setattr(sys.modules[place], stand_in.__name__, stand_in)
    implementation = IMPLEMENTATIONS[name]
    with lent(kind, arch):
        sizes = OP.sizes({**OP.defaults(arch), **parse(text)[0], "dtype": dtype})
        assert implementation.fits(sizes).ok
        operands = OP.operands(sizes, Seeds(), "cpu")
        prepared = implementation.prepare(operands, OP.empty_output(sizes, "cpu").fill_(math.nan))
        for live in (0, 1):
            fresh = OP.operands(sizes, Seeds(0, live), "cpu")
            prepared.load(fresh.live_tensors())
            prepared.call()
            report = judged(OP, implementation, sizes, fresh, prepared.result())
            assert report["ok"], report["reason"]
