"""MHA prefill's adapters that have no double, run against stand-ins with the real entries' arguments.

Weaker than a contract: who wrote the adapter read the source for both. It shows that each of their lines
runs, and that what they hand over means what the signatures say (AITER e404860, FlashInfer 0.6.18, SGLang
2026)."""

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


def attend(q, k, v, out, cu_q, cu_k, scale, causal, value_scale=1.0):
    """Sequence by sequence, causal to the last key."""
    places = (itertools.pairwise(t.tolist()) for t in (cu_q, cu_k))
    for (a, b), (c, d) in zip(*places, strict=True):
        scores = torch.einsum("nhd,mhd->hnm", q[a:b].float(), k[c:d].float()) * scale
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a) if causal else d)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out[a:b] = (torch.einsum("hnm,mhd->nhd", weights, v[c:d].float()) * value_scale).to(out.dtype)


def fmha_v3_varlen_fwd(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q, dropout_p, softmax_scale,
    logits_soft_cap, zero_tensors, is_causal, window_size_left, window_size_right, return_softmax_lse,
    return_dropout_randval, how_v3_bf16_cvt, out=None, block_table=None, bias=None, alibi_slopes=None,
    q_descale=None, k_descale=None, v_descale=None, gen=None, cu_seqlens_q_padded=None,
    cu_seqlens_k_padded=None,
):  # fmt: skip
    assert (window_size_left, window_size_right, logits_soft_cap, dropout_p) == (-1, -1, 0.0, 0.0)
    attend(q, k, v, out, cu_seqlens_q, cu_seqlens_k, softmax_scale, is_causal)


def mha_varlen_fwd(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q, dropout_p, softmax_scale,
    logits_soft_cap, zero_tensors, is_causal, window_size_left, window_size_right, sink_size,
    return_softmax_lse, return_dropout_randval, out=None, block_table=None, bias=None, alibi_slopes=None,
    q_descale=None, k_descale=None, v_descale=None, gen=None, cu_seqlens_q_padded=None,
    cu_seqlens_k_padded=None, sink_ptr=None,
):  # fmt: skip
    assert (window_size_left, window_size_right, sink_size, min_seqlen_q) == (-1, -1, 0, 0)
    attend(q, k, v, out, cu_seqlens_q, cu_seqlens_k, softmax_scale, is_causal)


def fmha_fwd_bf16_opus_varlen_fwd(
    q, k, v, softmax_scale, causal, seqstart_q, seqstart_k, max_seqlen_q, max_seqlen_k, out=None,
    seqstart_q_pad=None, seqstart_k_pad=None,
):  # fmt: skip
    attend(q, k, v, out, seqstart_q, seqstart_k, softmax_scale, causal)


def trtllm_ragged_attention_deepseek(
    query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale,
    batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse,
    attention_sinks=None, skip_softmax_threshold_scale_factor=None, out=None, lse=None, backend="trtllm-gen",
    q_seq_lens_cpu=None, kv_seq_lens_cpu=None,
):  # fmt: skip
    assert window_left == -1 and o_sf_scale == 1.0 and not return_lse
    assert seq_lens.dtype == torch.int32 and seq_lens.tolist() == kv_seq_lens_cpu.tolist()
    assert len(seq_lens) == batch_size and int(q_seq_lens_cpu.sum()) == len(query)
    assert int(q_seq_lens_cpu.max()) == max_q_len and int(seq_lens.max()) == max_kv_len
    attend(query, key, value, out, cum_seq_lens_q, cum_seq_lens_kv, bmm1_scale, is_causal, bmm2_scale)


class BatchPrefillWithRaggedKVCacheWrapper:
    """Its backend cudnn: where sequences begin is told in elements."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"):
        assert (kv_layout, backend) == ("NHD", "cudnn")

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False,
        sm_scale=None, q_data_type="float16", kv_data_type=None, o_data_type=None, seq_lens=None,
        seq_lens_q=None, max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None,
    ):  # fmt: skip
        heads = num_qo_heads
        assert (q_data_type, kv_data_type, o_data_type) == (torch.bfloat16,) * 3
        assert all(t.dtype == torch.int32 for t in (qo_indptr, kv_indptr, v_indptr, o_indptr))
        self.rows, self.keys = qo_indptr // (heads * head_dim_qk), kv_indptr // (heads * head_dim_qk)
        assert torch.equal(self.rows, o_indptr // (heads * head_dim_vo))
        assert torch.equal(self.keys, v_indptr // (heads * head_dim_vo))
        batch = len(qo_indptr) - 1
        assert seq_lens.shape == seq_lens_q.shape == (batch, 1, 1, 1)
        assert self.keys.diff().tolist() == seq_lens.flatten().tolist()
        assert self.rows.diff().tolist() == seq_lens_q.flatten().tolist()
        assert (int(seq_lens_q.max()), int(seq_lens.max())) == (max_token_per_sequence, max_sequence_kv)
        self.elements, self.causal, self.scale = int(qo_indptr[-1]), causal, sm_scale

    def run(self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None):
        assert q.numel() == self.elements
        attend(q, k, v, out, self.rows, self.keys, self.scale, self.causal)


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
    ("aiter.asm", "rocm", "gfx942", "bf16", "aiter", fmha_v3_varlen_fwd),
    ("aiter.ck", "rocm", "gfx942", "bf16", "aiter", mha_varlen_fwd),
    ("aiter.opus", "rocm", "gfx950", "bf16", "aiter", fmha_fwd_bf16_opus_varlen_fwd),
    ("flashinfer.cudnn", "cuda", "sm_90", "bf16", "flashinfer", BatchPrefillWithRaggedKVCacheWrapper),
    ("flashinfer.trtllm", "cuda", "sm_100", "bf16", "flashinfer.prefill", trtllm_ragged_attention_deepseek),
    ("flashinfer.trtllm", "cuda", "sm_100", "fp8", "flashinfer.prefill", trtllm_ragged_attention_deepseek),
    ("flashinfer.cute_dsl", "cuda", "sm_100", "fp8", "flashinfer.prefill", trtllm_ragged_attention_deepseek),
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
