"""The doubles of attention as vLLM and SGLang ship it against a plain softmax, and what each refuses."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from tests.doubles import lent
from tests.support.attention_problems import MISUSE, SCALE, differs, library, prefill

FP8 = torch.float8_e4m3fn
DECODES = [((130, 1, 64), 16, 1), ((65, 700), 16, 2), ((130,), 128, 1)]


def decode(lengths, heads, s_q=1, page=64, dtype=torch.bfloat16, seed=0):
    """Latent keys of 576 in scattered pages, zero where no token stands but NaN in the pages of none; `right`
    is their softmax in fp64, causal to the bottom right."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=g).int()
    cache = torch.zeros(len(order), page, 576, dtype=torch.float64)
    table = torch.full((len(lengths), max(counts) + 1), int(order[-1]), dtype=torch.int32)
    cache[order[-2:].long()] = torch.nan
    q = torch.randn(len(lengths), s_q, heads, 576, generator=g).to(dtype)
    right, used = torch.empty(len(lengths), s_q, heads, 512, dtype=torch.float64), 0
    log = torch.empty(len(lengths), heads, s_q, dtype=torch.float64)
    for i, n in enumerate(lengths):
        table[i, : counts[i]] = order[used : used + counts[i]]
        used += counts[i]
        keys = torch.randn(n, 576, generator=g).to(dtype).double()
        token = torch.arange(n)
        cache[table[i][token // page].long(), token % page] = keys
        for s in range(s_q):
            seen = keys[: n - s_q + s + 1]
            scores = q[i, s].double() @ seen.T * SCALE
            right[i, s], log[i, :, s] = scores.softmax(-1) @ seen[:, :512], scores.logsumexp(-1)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return SimpleNamespace(
        q=q, cache=cache.to(dtype)[:, :, None], table=table, lengths=lengths, right=right, log=log, page=page
    )


def close(found, right, tolerance=2e-2):
    torch.testing.assert_close(found.double(), right, atol=tolerance, rtol=tolerance)


def refuses(call, right, **wrong):
    """Raises, or gives what is not right."""
    try:
        out = call(**wrong)
    except (*MISUSE, IndexError):
        return
    out = out[0] if isinstance(out, tuple) else out
    assert out.shape != right.shape or differs(out, right.float()), wrong


def mla_arguments(o, **others):
    given = {"q": o.q, "k_cache": o.cache, "block_table": o.table, "cache_seqlens": o.lengths}
    return given | {"head_dim_v": 512, "softmax_scale": SCALE, "causal": True} | others


@pytest.fixture
def sgl_flash_mla():
    yield from library("flash_mla", "sgl_flash_mla")


@pytest.fixture
def sglang_flash_mla():
    yield from library(
        "sglang.kernels.ops.attention.flash_mla_interface", "sglang_attention", "sgl_flash_mla"
    )


@pytest.fixture
def vllm_flash_mla():
    yield from library("vllm.v1.attention.ops.flashmla", "vllm_attention")


@pytest.fixture
def vllm_flash_attn():
    yield from library("vllm.vllm_flash_attn", "vllm_attention")


@pytest.fixture
def sgl_kernel():
    yield from library("sgl_kernel.flash_attn", "sglang_kernel_attention")


@pytest.fixture
def fa4():
    yield from library("flash_attn.cute.interface", "flash_attn_4", arch="sm_100")


def each_flash_mla(sgl, sglang, vllm):
    """Every way to decode in bf16: a function of a problem and of what is wrong in it."""

    def of_sgl(o, **wrong):
        meta = sgl.get_mla_metadata()[0]
        given = mla_arguments(o, tile_scheduler_metadata=meta, use_legacy=True)
        return sgl.flash_mla_with_kvcache(**given | wrong)

    def of_sglang(o, **wrong):
        rows = o.q.shape[1] * o.q.shape[2]
        meta, splits = sglang.get_mla_metadata(o.lengths, rows, 1, is_fp8_kvcache=False)
        given = mla_arguments(o, tile_scheduler_metadata=meta, num_splits=splits)
        return sglang.flash_mla_with_kvcache(**given | wrong)

    def of_vllm(o, **wrong):
        meta = vllm.get_mla_metadata(o.lengths, 16, 1, is_fp8_kvcache=False)[0]
        given = mla_arguments(o, tile_scheduler_metadata=meta, is_fp8_kvcache=False)
        return vllm.flash_mla_with_kvcache(**given | wrong)

    return of_sgl, of_sglang, of_vllm


@pytest.mark.parametrize(("lengths", "heads", "s_q"), DECODES)
def test_flash_mla_of_each_engine_is_right(
    sgl_flash_mla, sglang_flash_mla, vllm_flash_mla, lengths, heads, s_q
):
    o = decode(lengths, heads, s_q)
    for call in each_flash_mla(sgl_flash_mla, sglang_flash_mla, vllm_flash_mla):
        out, lse = call(o)
        close(out, o.right)
        close(lse, o.log)


def test_flash_mla_of_each_engine_refuses(sgl_flash_mla, sglang_flash_mla, vllm_flash_mla):
    o = decode((130, 64), 16)
    halves = {"k_cache": o.cache.reshape(-1, 32, 1, 576), "block_table": o.table * 2}
    wrongs = (
        halves,
        {"block_table": o.table.long()},
        {"cache_seqlens": o.lengths.long()},
        {"q": o.q.float(), "k_cache": o.cache.float()},
        {"q": o.q.transpose(2, 3).contiguous().transpose(2, 3)},
        {"head_dim_v": 576},
        {"softmax_scale": None},
        {"tile_scheduler_metadata": torch.zeros(132, 8, dtype=torch.int32)},
        {"block_table": o.table.flip(0)},
    )
    for call in each_flash_mla(sgl_flash_mla, sglang_flash_mla, vllm_flash_mla):
        for wrong in wrongs:
            refuses(lambda call=call, **w: call(o, **w), o.right, **wrong)


def test_sgl_flash_mla_wants_to_hear_of_the_legacy_side(sgl_flash_mla):
    o = decode((130,), 16)
    given = mla_arguments(o, tile_scheduler_metadata=sgl_flash_mla.get_mla_metadata()[0])
    with pytest.raises(AssertionError, match="use_legacy"):
        sgl_flash_mla.flash_mla_with_kvcache(**given)
    with pytest.raises(AssertionError, match="legacy"):
        sgl_flash_mla.get_mla_decoding_metadata(o.lengths, 16, 1, is_fp8_kvcache=True)


def test_vllm_flash_mla_writes_into_a_given_output(vllm_flash_mla):
    o = decode((130,), 16)
    meta, out = vllm_flash_mla.get_mla_metadata()[0], torch.full((1, 1, 16, 512), torch.nan).bfloat16()
    found, _ = vllm_flash_mla.flash_mla_with_kvcache(
        **mla_arguments(o, tile_scheduler_metadata=meta, out=out)
    )
    assert found is out
    close(out, o.right)


def quantised(o):
    """e4m3 at scales that are not 1, so that a scale left out is seen."""
    small = decode(tuple(o.lengths.tolist()), o.q.shape[2], o.q.shape[1])
    small.q, small.cache = (o.q.float() / 0.05).to(FP8), (o.cache.float() / 0.1).to(FP8)
    return small, torch.tensor([0.05]), torch.tensor([0.1])


@pytest.mark.parametrize(("lengths", "heads", "s_q"), DECODES)
def test_flash_mla_of_fp8_is_right(sgl_flash_mla, sglang_flash_mla, vllm_flash_mla, lengths, heads, s_q):
    o, q_scale, k_scale = quantised(decode(lengths, heads, s_q))
    right = fp8_softmax(o, q_scale, k_scale)
    scales = {"descale_q": q_scale, "descale_k": k_scale}
    meta, splits = vllm_flash_mla.get_mla_metadata_dense_fp8(o.lengths, heads * s_q, 1)
    given = mla_arguments(o, tile_scheduler_metadata=meta, num_splits=splits, **scales)
    out, _ = vllm_flash_mla.flash_mla_with_kvcache_fp8(**given)
    close(out, right)
    assert out.dtype == torch.bfloat16
    meta, splits = sglang_flash_mla.get_mla_metadata(o.lengths, heads * s_q, 1, is_fp8_kvcache=True)
    given = mla_arguments(o, tile_scheduler_metadata=meta, num_splits=splits, **scales)
    close(sglang_flash_mla.flash_mla_with_kvcache(**given)[0], right)
    kept = sgl_flash_mla.get_mla_metadata()[0]
    kept.tile_scheduler_metadata, kept.num_splits = meta, splits
    given = mla_arguments(o, tile_scheduler_metadata=kept, is_fp8_kvcache=True, use_legacy=True, **scales)
    close(sgl_flash_mla.flash_mla_with_kvcache(**given)[0], right)


def fp8_softmax(o, q_scale, k_scale):
    right = torch.empty(*o.q.shape[:-1], 512, dtype=torch.float64)
    for i, n in enumerate(o.lengths.tolist()):
        token = torch.arange(n)
        keys = o.cache[o.table[i][token // 64].long(), token % 64, 0].double() * k_scale.double()
        for s in range(o.q.shape[1]):
            seen = keys[: n - o.q.shape[1] + s + 1]
            scores = o.q[i, s].double() * q_scale.double() @ seen.T * SCALE
            right[i, s] = scores.softmax(-1) @ seen[:, :512]
    return right


def test_flash_mla_of_fp8_refuses(vllm_flash_mla):
    o, q_scale, k_scale = quantised(decode((130, 700), 16))
    right = fp8_softmax(o, q_scale, k_scale)
    meta, splits = vllm_flash_mla.get_mla_metadata_dense_fp8(o.lengths, 16, 1)
    stale = vllm_flash_mla.get_mla_metadata_dense_fp8(torch.tensor([130, 64], dtype=torch.int32), 16, 1)
    given = mla_arguments(o, tile_scheduler_metadata=meta, num_splits=splits)
    given |= {"descale_q": q_scale, "descale_k": k_scale}

    def call(**wrong):
        return vllm_flash_mla.flash_mla_with_kvcache_fp8(**given | wrong)

    for wrong in (
        {"descale_q": None},
        {"descale_k": k_scale.double()},
        {"descale_k": k_scale.expand(2)},
        {"descale_k": q_scale},
        {"tile_scheduler_metadata": None},
        {"tile_scheduler_metadata": vllm_flash_mla.get_mla_metadata()[0]},
        {"tile_scheduler_metadata": stale[0], "num_splits": stale[1]},
        {"num_splits": splits.long()},
        {"q": o.q.to(torch.bfloat16)},
        {"block_table": o.table.long()},
        {"k_cache": o.cache.reshape(-1, 32, 1, 576), "block_table": o.table * 2},
    ):
        refuses(call, right, **wrong)


def cumulative(o):
    return torch.arange(len(o.lengths) + 1, dtype=torch.int32) * o.q.shape[1]


def vllm_decode(module, o, **wrong):
    flat = o.q.reshape(-1, *o.q.shape[2:])
    given = {"q": flat[..., 512:], "q_v": flat[..., :512], "k": o.cache[..., 512:], "v": o.cache[..., :512]}
    given |= {"max_seqlen_q": o.q.shape[1], "cu_seqlens_q": cumulative(o), "seqused_k": o.lengths}
    given |= {"max_seqlen_k": int(o.lengths.max()), "block_table": o.table, "softmax_scale": SCALE}
    given |= {"causal": True, "fa_version": 3} | wrong
    return module.flash_attn_varlen_func(**given)


def vllm_metadata(module, o, **others):
    given = {"batch_size": len(o.lengths), "max_seqlen_q": o.q.shape[1], "num_heads_q": o.q.shape[2]}
    given |= {"max_seqlen_k": int(o.lengths.max()), "num_heads_kv": 1, "headdim": 64, "headdim_v": 512}
    given |= {"cache_seqlens": o.lengths, "cu_seqlens_q": cumulative(o), "page_size": o.page, "causal": True}
    return module.get_scheduler_metadata(**given | others)


def sgl_decode(module, o, **wrong):
    flat = o.q.reshape(-1, *o.q.shape[2:])
    given = {"q": flat[..., 512:], "qv": flat[..., :512], "cache_seqlens": o.lengths, "page_table": o.table}
    given |= {"k_cache": o.cache[..., 512:], "v_cache": o.cache[..., :512], "cu_seqlens_q": cumulative(o)}
    given |= {"cu_seqlens_k_new": o.lengths, "max_seqlen_q": o.q.shape[1], "softmax_scale": SCALE}
    return module.flash_attn_with_kvcache(**given | {"causal": True} | wrong)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize(("lengths", "heads", "s_q"), DECODES)
def test_flash_attention_3_of_each_engine_decodes(vllm_flash_attn, sgl_kernel, lengths, heads, s_q, page):
    o = decode(lengths, heads, s_q, page)
    right = o.right.flatten(0, 1)
    for splits in (0, 1, 32):
        meta = vllm_metadata(vllm_flash_attn, o, num_splits=splits)
        out = vllm_decode(vllm_flash_attn, o, scheduler_metadata=meta, num_splits=splits)
        close(out, right)
    out, lse = vllm_decode(vllm_flash_attn, o, return_softmax_lse=True)
    close(lse, o.log.transpose(1, 2).flatten(0, 1).T)
    close(sgl_decode(sgl_kernel, o), right)


def test_flash_attention_3_multiplies_what_a_page_holds_beyond_the_sequence(vllm_flash_attn, sgl_kernel):
    full, few = decode((130,), 128), decode((130,), 16)
    for o in (full, few):
        o.cache[o.table[0, 2].long(), 2:] = torch.nan
    assert vllm_decode(vllm_flash_attn, full).isnan().all() and sgl_decode(sgl_kernel, full).isnan().all()
    close(vllm_decode(vllm_flash_attn, few), few.right.flatten(0, 1))


def test_flash_attention_3_of_each_engine_refuses(vllm_flash_attn, sgl_kernel):
    o = decode((130, 64, 3, 9, 5), 16, 1)
    right = o.right.flatten(0, 1)
    float_cache = o.cache.float()
    for wrong in (
        {"fa_version": 2},
        {"fa_version": 4},
        {"fa_version": 5},
        {"q_v": None},
        {"softmax_scale": None},
        {"seqused_k": o.lengths.long()},
        {"seqused_k": None},
        {"cu_seqlens_k": cumulative(o)},
        {"block_table": o.table.long()},
        {"block_table": o.table.flip(0)},
        {"v": float_cache[..., :512], "k": float_cache[..., 512:]},
        {"scheduler_metadata": vllm_metadata(vllm_flash_attn, o, num_splits=32)},
        {"scheduler_metadata": torch.zeros(9, dtype=torch.int64)},
        {"scheduler_metadata": torch.zeros(9, dtype=torch.int32), "num_splits": 1},
    ):
        refuses(lambda **w: vllm_decode(vllm_flash_attn, o, **w), right, **wrong)
    for wrong in (
        {"qv": None},
        {"max_seqlen_q": None},
        {"cache_seqlens": o.lengths.long()},
        {"page_table": o.table.long()},
        {"v_cache": o.cache[..., :512].transpose(1, 3).contiguous().transpose(1, 3)},
        {"k_cache": None},
        {"scheduler_metadata": vllm_metadata(vllm_flash_attn, o)},
    ):
        refuses(lambda **w: sgl_decode(sgl_kernel, o, **w), right, **wrong)
    meta = sgl_kernel.get_scheduler_metadata(
        *(5, 1, 130, 16, 1, 64, o.lengths),
        headdim_v=512,
        page_size=64,
        causal=True,
        cu_seqlens_q=cumulative(o),
    )
    close(sgl_decode(sgl_kernel, o, scheduler_metadata=meta), right)


def varlen(function, o, **others):
    given = {"q": o.q, "k": o.k, "v": o.v, "cu_seqlens_q": o.cu_q, "cu_seqlens_k": o.cu_k, "causal": True}
    given |= {"max_seqlen_q": o.max_q, "max_seqlen_k": o.max_k, "softmax_scale": SCALE}
    out = function(**given | others)
    return out[0] if isinstance(out, tuple) else out


def test_prefill_of_each_engine(vllm_flash_attn, sgl_kernel):
    o = prefill((3, 20), (30, 25))
    close(varlen(vllm_flash_attn.flash_attn_varlen_func, o, fa_version=3), o.right.double())
    close(varlen(vllm_flash_attn.flash_attn_varlen_func, o, fa_version=4), o.right.double())
    close(varlen(sgl_kernel.flash_attn_varlen_func, o), o.right.double())
    for function in (vllm_flash_attn.flash_attn_varlen_func, sgl_kernel.flash_attn_varlen_func):
        base = {"fa_version": 3} if function is vllm_flash_attn.flash_attn_varlen_func else {}
        for wrong in (
            {"cu_seqlens_k": o.cu_k.long()},
            {"cu_seqlens_k": o.cu_q},
            {"max_seqlen_q": None},
            {"max_seqlen_k": 3},
            {"v": o.v.half()},
            {"causal": False},
        ):
            refuses(lambda f=function, b=base, **w: varlen(f, o, **b | w), o.right.double(), **wrong)
    strided = o.q.transpose(1, 2).contiguous().transpose(1, 2).transpose(0, 2).contiguous().transpose(0, 2)
    with pytest.raises(RuntimeError, match="contiguous last dimension"):
        varlen(sgl_kernel.flash_attn_varlen_func, o, q=strided)
    with pytest.raises(RuntimeError, match="v must have shape"):
        varlen(vllm_flash_attn.flash_attn_varlen_func, o)


def test_blackwell_has_no_flash_attention_3():
    o = prefill((3,), (3,))
    with lent("cuda", "sm_100", "vllm_attention", "sglang_kernel_attention"):
        module = importlib.import_module("vllm.vllm_flash_attn")
        assert not module.is_fa_version_supported(3) and module.is_fa_version_supported(4)
        with pytest.raises(RuntimeError, match="Hopper"):
            varlen(module.flash_attn_varlen_func, o, fa_version=3)
        close(varlen(module.flash_attn_varlen_func, o, fa_version=4), o.right.double())
        with pytest.raises(NotImplementedError):
            varlen(importlib.import_module("sgl_kernel.flash_attn").flash_attn_varlen_func, o)


def fa4_decode(module, o, **wrong):
    flat = o.q.reshape(-1, *o.q.shape[2:])
    given = {"q": flat[..., 512:], "qv": flat[..., :512], "k": o.cache[..., 512:], "v": o.cache[..., :512]}
    given |= {"cu_seqlens_q": cumulative(o), "max_seqlen_q": o.q.shape[1], "seqused_k": o.lengths}
    given |= {"page_table": o.table, "softmax_scale": SCALE, "causal": True}
    return module.flash_attn_varlen_func(**given | wrong)[0]


@pytest.mark.parametrize("page", [1, 64, 128])
@pytest.mark.parametrize("splits", [0, 1, 4])
def test_flash_attention_4_decodes(fa4, page, splits):
    for lengths, heads, s_q in DECODES:
        o = decode(lengths, heads, s_q, page)
        close(fa4_decode(fa4, o, num_splits=splits), o.right.flatten(0, 1))


def test_flash_attention_4_multiplies_what_a_page_holds_beyond_the_sequence(fa4):
    for page, heads, splits, spreads in ((64, 16, 4, True), (64, 16, 1, False), (64, 128, 4, False)):
        o = decode((1000,), heads, page=page)
        o.cache[o.table[0, 15].long(), 40:] = torch.nan
        out = fa4_decode(fa4, o, num_splits=splits)
        assert out.isnan().all() if spreads else not out.isnan().any(), (page, heads, splits)


def test_flash_attention_4_of_fp8(fa4):
    o = prefill((3, 20), (30, 25))
    o8 = {name: (getattr(o, name).float() / 0.02).to(FP8) for name in "qkv"}
    scale = torch.full((2, 4), 0.02)
    given = o8 | {"cu_seqlens_q": o.cu_q, "cu_seqlens_k": o.cu_k, "softmax_scale": SCALE, "causal": True}
    out = fa4._flash_attn_fwd(**given, q_descale=scale, k_descale=scale, v_descale=scale)[0]
    torch.testing.assert_close(out.float(), o.right, atol=0.3, rtol=0.3)
    for wrong in (scale.double(), scale[:, :1], torch.ones(1)):
        with pytest.raises(AssertionError, match="descale"):
            fa4._flash_attn_fwd(**given, q_descale=wrong)
    with pytest.raises(AssertionError, match="FP8 inputs"):
        varlen(fa4._flash_attn_fwd, o, k_descale=scale)


def test_flash_attention_4_of_fp8_mla_takes_one_descale_for_keys_and_values(fa4):
    o, q_scale, k_scale = quantised(decode((130, 64), 16))
    right = fp8_softmax(o, q_scale, k_scale).flatten(0, 1)
    flat = o.q.flatten(0, 1)
    given = {"q": flat[..., 512:], "qv": flat[..., :512], "k": o.cache[..., 512:], "v": o.cache[..., :512]}
    given |= {"cu_seqlens_q": cumulative(o), "max_seqlen_q": 1, "seqused_k": o.lengths, "page_table": o.table}
    given |= {"softmax_scale": SCALE, "causal": True, "q_descale": q_scale.expand(2, 1)}
    one = k_scale.repeat(2, 1)
    close(fa4._flash_attn_fwd(**given, k_descale=one, v_descale=one)[0], right)
    with pytest.raises(AssertionError, match="same tensor"):
        fa4._flash_attn_fwd(**given, k_descale=one, v_descale=one.clone())
    with pytest.raises(AssertionError, match="together"):
        fa4._flash_attn_fwd(**given, v_descale=one)


def test_flash_attention_4_refuses(fa4):
    o = decode((130, 64), 16)
    for wrong in (
        {"page_table": o.table.long()},
        {"seqused_k": o.lengths.long()},
        {"seqused_k": None},
        {"cu_seqlens_k": cumulative(o)},
        {"qv": None},
        {"softmax_scale": None},
        {"k": o.cache[..., 512:].half()},
    ):
        refuses(lambda **w: fa4_decode(fa4, o, **w), o.right.flatten(0, 1), **wrong)


@pytest.mark.parametrize(
    ("double", "module", "version"),
    [
        ("sgl_flash_mla", "flash_mla", "1.0.0"),
        ("vllm_attention", "vllm", "0.33.0"),
        ("sglang_attention", "sglang", "0.5.23"),
        ("sglang_kernel_attention", "sgl_kernel", "0.4.10"),
        ("flash_attn_4", "flash_attn.cute", "0.0.0"),
    ],
)
def test_each_says_its_version(double, module, version):
    with lent("cuda", "sm_90", double):
        assert importlib.import_module(module).__version__ == version
