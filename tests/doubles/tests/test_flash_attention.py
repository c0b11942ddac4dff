"""The doubles of FlashAttention 2, 3 and 4 against plain torch, and that each wrong use is noticed."""

import importlib
import inspect

import pytest
import torch

from tests.doubles import lent
from tests.support.attention_problems import (
    DECODES,
    MISUSE,
    PREFILLS,
    SCALE,
    close,
    decode,
    differs,
    library,
    prefill,
)


@pytest.fixture
def fa2():
    yield from library("flash_attn", "flash_attn", "flash_attn_4")  # which stand in one package


@pytest.fixture
def fa3():
    yield from library("flash_attn_interface", "flash_attn_3")


@pytest.fixture
def fa4():
    yield from library("flash_attn.cute", "flash_attn_4")


def varlen(function, o, **changed):
    given = {
        "q": o.q,
        "k": o.k,
        "v": o.v,
        "cu_seqlens_q": o.cu_q,
        "cu_seqlens_k": o.cu_k,
        "max_seqlen_q": o.max_q,
    }
    out = function(**given | {"max_seqlen_k": o.max_k, "softmax_scale": SCALE, "causal": True} | changed)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize(("queries", "keys"), PREFILLS)
def test_flash_attention_is_right(fa2, fa3, queries, keys):
    o = prefill(queries, keys)
    fa4 = importlib.import_module("flash_attn.cute")
    padded = torch.nn.functional.pad(o.v, (0, 64))
    close(varlen(fa2.flash_attn_varlen_func, o, v=padded)[..., :128], o.right)
    close(varlen(fa3.flash_attn_varlen_func, o), o.right)
    close(varlen(fa4.flash_attn_varlen_func, o), o.right)


def test_flash_attention_notices(fa2, fa3):
    o = prefill((3, 20), (30, 25))
    fa4 = importlib.import_module("flash_attn.cute")
    right = {fa2: {"v": torch.nn.functional.pad(o.v, (0, 64))}, fa3: {}, fa4: {}}
    wrongs = (
        {"cu_seqlens_q": o.cu_q.long()},
        {"cu_seqlens_k": o.cu_k[:-1]},
        {"cu_seqlens_k": o.cu_q},
        {"k": o.k.half()},
        {"max_seqlen_q": 3},
        {"max_seqlen_k": 3},
        {"causal": False},
        {"softmax_scale": None},
        {"q": o.q.float(), "k": o.k.float()},
    )
    for module, base in right.items():
        for wrong in wrongs:
            try:
                out = varlen(module.flash_attn_varlen_func, o, **base | wrong)
            except MISUSE:
                continue
            assert differs(out[..., :128], o.right), (module, wrong)
    with pytest.raises(RuntimeError, match="v must have shape"):
        varlen(fa2.flash_attn_varlen_func, o)


def test_flash_attention_3_of_fp8(fa3):
    o = prefill((3, 20), (30, 25))
    scale, fp8 = 0.02, torch.float8_e4m3fn
    o8 = {n: (getattr(o, n).float() / scale).to(fp8) for n in "qkv"}
    descale = torch.full((2, 4), scale)
    descales = {"q_descale": descale, "k_descale": descale, "v_descale": descale}
    out = varlen(fa3.flash_attn_varlen_func, o, **o8, **descales)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), o.right, atol=0.3, rtol=0.3)
    assert differs(varlen(fa3.flash_attn_varlen_func, o, **o8), o.right)
    for wrong in (torch.full((2, 4), scale).double(), torch.full((1,), scale), torch.full((2, 8), scale)):
        with pytest.raises(RuntimeError):
            varlen(fa3.flash_attn_varlen_func, o, **o8, **descales | {"q_descale": wrong})


def test_flash_attention_4_of_fp8_is_blackwell_and_without_scales(fa4):
    assert not {"q_descale", "k_descale"} & set(inspect.signature(fa4.flash_attn_varlen_func).parameters)
    o = prefill((3,), (3,))
    with pytest.raises(AssertionError, match="SM100"):
        varlen(fa4.flash_attn_varlen_func, o, **{n: getattr(o, n).to(torch.float8_e4m3fn) for n in "qkv"})


def fa3_decode(fa3, o, **changed):
    given = {"q": o.q[..., 512:], "qv": o.q[..., :512], "k_cache": o.cache[:, :, None, 512:]}
    given |= {"v_cache": o.cache[:, :, None, :512], "cache_seqlens": o.lengths, "page_table": o.table}
    return fa3.flash_attn_with_kvcache(**given | {"softmax_scale": SCALE, "causal": True} | changed)


def fa3_metadata(fa3, o, page, **changed):
    b, s_q, heads, _ = o.q.shape
    given = {"batch_size": b, "max_seqlen_q": s_q, "max_seqlen_k": int(o.lengths.max()), "num_heads_q": heads}
    given |= {
        "num_heads_kv": 1,
        "headdim": 64,
        "cache_seqlens": o.lengths,
        "headdim_v": 512,
        "page_size": page,
        "causal": True,
    }
    return fa3.get_scheduler_metadata(**given | changed)


@pytest.mark.parametrize(("lengths", "heads", "s_q"), DECODES)
@pytest.mark.parametrize("page", [1, 64])
def test_flash_attention_3_decodes(fa3, lengths, heads, s_q, page):
    o = decode(lengths, heads, page, s_q)
    o.cache = o.cache.nan_to_num(0.0) if loads_pages(page, heads * s_q) else o.cache
    close(fa3_decode(fa3, o), o.right)
    close(fa3_decode(fa3, o, scheduler_metadata=fa3_metadata(fa3, o, page)), o.right)


def loads_pages(page, rows):
    """flash_api.cpp:415, get_pagedkv_tma at MLA's sizes."""
    return page % 64 == 0 and rows > 64


def test_flash_attention_3_reads_what_a_page_holds_beyond_the_sequence(fa3):
    o = decode((130,), 128, 64)
    assert fa3_decode(fa3, o).isnan().all()


def test_flash_attention_3_metadata_of_others_is_stale(fa3):
    o = decode((130, 64, 3), 128, 64, 2)
    for wrong in (
        {"batch_size": 2, "cache_seqlens": o.lengths[:2]},
        {"max_seqlen_q": 1},
        {"num_heads_q": 64},
    ):
        meta = fa3_metadata(fa3, o, 64, **wrong)
        try:
            out = fa3_decode(fa3, o, scheduler_metadata=meta)
        except MISUSE:
            continue
        assert differs(out, o.right), wrong
    with pytest.raises(RuntimeError):
        fa3_decode(fa3, o, scheduler_metadata=torch.zeros(13, dtype=torch.int32))


def test_flash_attention_3_decoding_notices(fa3):
    o = decode((130, 30), 16, 64)
    for wrong in (
        {"qv": None},
        {"softmax_scale": None},
        {"cache_seqlens": 130},
        {"cache_seqlens": o.lengths.long()},
        {"page_table": o.table.long()},
        {"page_table": o.table.flip(0)},
        {"q": o.q[..., :64]},
        {"k_cache": o.cache[..., 512:]},
    ):
        try:
            out = fa3_decode(fa3, o, **wrong)
        except (*MISUSE, IndexError):
            continue
        assert differs(out, o.right), wrong


def test_flash_attention_3_needs_hopper():
    with lent("cuda", "sm_100", "flash_attn_3"), pytest.raises(RuntimeError, match="Hopper"):
        varlen(importlib.import_module("flash_attn_interface").flash_attn_varlen_func, prefill((3,), (3,)))
