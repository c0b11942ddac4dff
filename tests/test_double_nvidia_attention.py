"""The doubles of NVIDIA's attention libraries against plain torch, and that each wrong use is noticed."""

import importlib
import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from kernels import platform
from tests.doubles import lent

SCALE = 0.1147  # not the default of any library
MISUSE = (RuntimeError, ValueError, AssertionError, TypeError, AttributeError)


def library(module, *doubles, arch="sm_90"):
    with lent("cuda", arch, *doubles):
        yield importlib.import_module(module)


@pytest.fixture
def flash_mla():
    yield from library("flash_mla", "flash_mla")


@pytest.fixture
def flash_mla_2025():
    yield from library("flash_mla", "flash_mla_2025")


@pytest.fixture
def flashinfer():
    yield from library("flashinfer", "flashinfer_attention")


@pytest.fixture
def flashinfer_sm_100():
    yield from library("flashinfer", "flashinfer_attention", arch="sm_100")


@pytest.fixture
def fa2():
    yield from library("flash_attn", "flash_attn", "flash_attn_4")  # which stand in one package


@pytest.fixture
def fa3():
    yield from library("flash_attn_interface", "flash_attn_3")


@pytest.fixture
def fa4():
    yield from library("flash_attn.cute", "flash_attn_4")


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


# FlashMLA


def mla(library, o, meta=None, splits=None, lengths=None, **changed):
    q, cache, table, used = o.q, o.cache[:, :, None], o.table, o.lengths if lengths is None else lengths
    given = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": used, "head_dim_v": 512}
    given |= {"tile_scheduler_metadata": meta, "num_splits": splits, "softmax_scale": SCALE, "causal": True}
    return library.flash_mla_with_kvcache(**given | changed)


@pytest.mark.parametrize(("lengths", "heads", "s_q"), DECODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_mla_is_right(flash_mla, lengths, heads, s_q, dtype):
    o = decode(lengths, heads, 64, s_q, dtype)
    meta, none = flash_mla.get_mla_metadata()
    assert none is None
    for _ in range(2):  # the second call finds the metadata filled
        out, lse = mla(flash_mla, o, meta)
        close(out, o.right)
    assert out.dtype == dtype and lse.shape == (len(lengths), heads, s_q)


def test_flash_mla_of_2025_is_right(flash_mla_2025):
    for lengths, heads, s_q in DECODES:
        o = decode(lengths, heads, 64, s_q)
        meta = flash_mla_2025.get_mla_metadata(o.lengths, s_q * heads, 1)
        out, _ = mla(flash_mla_2025, o, *meta)
        close(out, o.right)


@pytest.mark.parametrize("long", [640, 1300])
def test_flash_mla_splits_long_sequences(flash_mla, long):
    o = decode((long, 3), 16, 64)
    meta, _ = flash_mla.get_mla_metadata()
    close(mla(flash_mla, o, meta)[0], o.right)
    assert (meta.num_splits[1:] - meta.num_splits[:-1]).max() > 1


def test_flash_mla_metadata_of_other_lengths_is_stale(flash_mla):
    o = decode((1300, 3), 16, 64)
    meta, _ = flash_mla.get_mla_metadata()
    mla(flash_mla, o, meta, lengths=torch.tensor([100, 3], dtype=torch.int32))
    assert differs(mla(flash_mla, o, meta)[0], o.right)


def test_flash_mla_metadata_of_other_shapes_is_refused(flash_mla):
    meta, _ = flash_mla.get_mla_metadata()
    mla(flash_mla, decode((64, 1), 16, 64), meta)
    for other in (decode((64,), 16, 64), decode((64, 1), 32, 64), decode((64, 2), 16, 64, 2)):
        with pytest.raises(AssertionError, match="sched_meta"):
            mla(flash_mla, other, meta)


def test_flash_mla_of_2025_metadata_of_other_lengths_is_stale(flash_mla_2025):
    o = decode((1300, 3), 16, 64)
    meta = flash_mla_2025.get_mla_metadata(torch.tensor([100, 3], dtype=torch.int32), 16, 1)
    assert differs(mla(flash_mla_2025, o, *meta)[0], o.right)
    with pytest.raises(TypeError):
        mla(flash_mla_2025, o)


def wrong_mla(o):
    """Changes to a right call that a caller may well make."""
    table, cache = o.table, o.cache[:, :, None]
    return {
        "long table": {"block_table": table.long()},
        "long lengths": {"cache_seqlens": o.lengths.long()},
        "strided lengths": {"cache_seqlens": o.lengths.repeat_interleave(2)[::2]},
        "another dtype": {"q": o.q.half()},
        "float": {"q": o.q.float(), "k_cache": cache.float()},
        "page of 32": {"k_cache": cache.reshape(-1, 32, 1, 576), "block_table": table * 2},
        "heads swapped": {"q": o.q.transpose(1, 2)},
        "no scale": {"softmax_scale": None},
        "another table": {"block_table": table.flip(0)},
        "a page too far": {"block_table": table + len(cache)},
        "values of 576": {"head_dim_v": 576},
        "column-major q": {"q": o.q.transpose(2, 3).contiguous().transpose(2, 3)},
        "unaligned cache": {"k_cache": torch.nn.functional.pad(cache, (0, 1))[..., :576]},
    }


@pytest.mark.parametrize("case", sorted(wrong_mla(decode((64, 1), 16, 64))))
def test_flash_mla_notices(flash_mla, case):
    o = decode((100, 30), 16, 64)
    try:
        out, _ = mla(flash_mla, o, flash_mla.get_mla_metadata()[0], **wrong_mla(o)[case])
    except MISUSE:
        return
    assert out.shape != o.right.shape or differs(out, o.right)


def test_flash_mla_needs_hopper():
    with lent("cuda", "sm_100", "flash_mla"):
        library = importlib.import_module("flash_mla")
        with pytest.raises(RuntimeError, match="SM90a"):
            mla(library, decode((3,), 16, 64), library.get_mla_metadata()[0])


# FlashInfer, decoding


def plan(flashinfer, o, page, backend="auto", dtype=None, **changed):
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.int8), backend=backend
    )
    b, s_q, heads, _ = o.q.shape
    given = {
        "qo_indptr": torch.arange(b + 1, dtype=torch.int32) * s_q,
        "kv_indptr": o.indptr,
        "kv_indices": o.indices,
    }
    given |= {
        "kv_len_arr": o.lengths,
        "num_heads": heads,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": page,
    }
    given |= {
        "causal": True,
        "sm_scale": SCALE,
        "q_data_type": o.q.dtype,
        "kv_data_type": dtype or o.cache.dtype,
    }
    wrapper.plan(**given | changed)
    return wrapper


def halves(o):
    q = o.q.flatten(0, 1)
    return {
        "q_nope": q[..., :512],
        "q_pe": q[..., 512:],
        "ckv_cache": o.cache[..., :512],
        "kpe_cache": o.cache[..., 512:],
    }


@pytest.mark.parametrize(("lengths", "heads", "s_q"), DECODES)
@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_flashinfer_mla_is_right(flashinfer, lengths, heads, s_q, page, backend):
    o = decode(lengths, heads, page, s_q)
    wrapper = plan(flashinfer, o, page, backend)
    close(wrapper.run(**halves(o)).view(o.right.shape), o.right)
    given = torch.empty(len(lengths) * s_q, heads, 512, dtype=torch.bfloat16)
    out, lse = wrapper.run(**halves(o), out=given, return_lse=True, return_lse_base_on_e=True)
    assert out is given and torch.allclose(wrapper.run(**halves(o), return_lse=True)[1] * math.log(2), lse)


def test_flashinfer_mla_of_fp8_keys(flashinfer):
    o = decode((130, 3), 16, 64)
    scale, fp8 = 0.03, torch.float8_e4m3fn
    wrapper = plan(flashinfer, o, 64, dtype=fp8)
    parts = halves(o)
    quantised = {n: (parts[n].float() / scale).to(fp8) for n in ("ckv_cache", "kpe_cache")}
    out = wrapper.run(**parts | quantised, ckv_scale=scale, kpe_scale=scale)
    torch.testing.assert_close(out.view(o.right.shape).float(), o.right, atol=0.4, rtol=0.2)
    with pytest.raises(ValueError, match="Exactly one"):
        wrapper.run(**parts | quantised)


def test_flashinfer_mla_reads_what_plan_saw(flashinfer):
    o = decode((130, 3), 16, 64)
    wrapper = plan(flashinfer, o, 64)
    o.lengths.fill_(1)  # the schedule keeps lengths; pages are read anew
    close(wrapper.run(**halves(o)).view(o.right.shape), o.right)
    o.indices.copy_(o.indices.flip(0))
    assert differs(wrapper.run(**halves(o)).view(o.right.shape), o.right)


WRONG_PLANS = {
    "long indptr": lambda o: {"kv_indptr": o.indptr.long()},
    "short indptr": lambda o: {"kv_indptr": o.indptr[:-1]},
    "long lengths": lambda o: {"kv_len_arr": o.lengths.long()},
    "long indices": lambda o: {"kv_indices": o.indices.long()},
    "another scale": lambda o: {"sm_scale": 192**-0.5},
    "another dtype": lambda o: {"q_data_type": torch.float16},
    "other heads": lambda o: {"num_heads": 8},
    "page of 1": lambda o: {"page_size": 1},
    "page indices of tokens": lambda o: {"kv_indptr": torch.tensor([0, 130, 133], dtype=torch.int32)},
    "last page lengths": lambda o: {"kv_len_arr": (o.lengths - 1) % 64 + 1},
}


@pytest.mark.parametrize("case", sorted(WRONG_PLANS))
def test_flashinfer_mla_notices(flashinfer, case):
    o = decode((130, 3), 16, 64)
    try:
        out = plan(flashinfer, o, 64, **WRONG_PLANS[case](o)).run(**halves(o))
    except MISUSE:
        return
    assert differs(out.view(o.right.shape), o.right)


def test_flashinfer_mla_notices_operands(flashinfer):
    o = decode((130, 3), 16, 64)
    wrapper, parts = plan(flashinfer, o, 64), halves(o)
    for wrong in (
        {"q_nope": parts["q_pe"]},
        {"ckv_cache": parts["ckv_cache"][:, :, None]},
        {"ckv_cache": parts["ckv_cache"].half()},
        {"out": torch.empty(2, 16, 512)},
        {"o_scale": 1.0},
        {"ckv_scale": 1.0, "kpe_scale": 1.0},
    ):
        with pytest.raises(MISUSE):
            wrapper.run(**parts | wrong)


def test_flashinfer_backends_by_architecture(flashinfer_sm_100):
    o = decode((130, 3), 128, 64)
    with pytest.raises(RuntimeError, match="fa3"):
        plan(flashinfer_sm_100, o, 64, "fa3")
    with pytest.warns(UserWarning, match="fa2"):
        close(plan(flashinfer_sm_100, o, 64).run(**halves(o)).view(o.right.shape), o.right)
    with pytest.raises(ValueError, match="SM90"), pytest.warns(UserWarning):
        plan(flashinfer_sm_100, o, 64, dtype=torch.float8_e4m3fn)


def test_flashinfer_cutlass_has_a_scale_of_its_own(flashinfer_sm_100):
    wrapper = flashinfer_sm_100.mla.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20), backend="cutlass")
    o = decode((130, 3), 128, 64)
    more = {"kv_len": o.lengths, "page_table": o.table}
    out = wrapper.run(**halves(o), **more)
    assert differs(out.view(o.right.shape), o.right)
    o.q *= SCALE / 192**-0.5
    torch.testing.assert_close(wrapper.run(**halves(o), **more).float(), o.right[:, 0], atol=0.1, rtol=0.1)
    with pytest.raises(ValueError, match="block_num"):
        wrapper.run(**halves(o), kv_len=o.lengths, page_table=o.table[:, :3].contiguous())
    few = decode((130, 3), 16, 64)
    with pytest.raises(ValueError, match="128 heads"):
        wrapper.run(**halves(few), **more)


def trtllm(flashinfer, o, **changed):
    given = {"query": o.q, "kv_cache": o.cache, "workspace_buffer": torch.zeros(1 << 20, dtype=torch.uint8)}
    given |= {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "block_tables": o.table}
    given |= {"seq_lens": o.lengths, "max_seq_len": int(o.lengths.max()), "bmm1_scale": SCALE}
    return flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(**given | changed)


def test_trtllm_mla(flashinfer_sm_100):
    for lengths, heads, s_q in DECODES:
        for page in (32, 64):
            o = decode(lengths, heads, page, s_q)
            close(trtllm(flashinfer_sm_100, o), o.right)
            close(trtllm(flashinfer_sm_100, o, kv_cache=o.cache[:, None]), o.right)
    o = decode((130, 3), 16, 64)
    assert differs(trtllm(flashinfer_sm_100, o, bmm1_scale=1.0), o.right)
    for wrong in (
        {"query": o.q[:, 0]},
        {"block_tables": o.table.long()},
        {"block_tables": o.table[:, :3].contiguous()},
        {"max_seq_len": 64},
        {"seq_lens": None},
        {"out": torch.empty(2, 1, 16, 512)},
        {"kv_cache": o.cache[:, :, None]},
        {"query": o.q.half(), "kv_cache": o.cache.half()},
        {"bmm1_scale": torch.tensor([SCALE])},
        {"query": o.q.repeat(1, 1, 6, 1)},
    ):
        with pytest.raises(MISUSE):
            trtllm(flashinfer_sm_100, o, **wrong)
    close(
        trtllm(flashinfer_sm_100, o, block_tables=o.table[:, :3].contiguous(), backend="trtllm-gen"), o.right
    )


def test_trtllm_mla_needs_blackwell(flashinfer):
    with pytest.raises(ValueError, match="XQA"):
        trtllm(flashinfer, decode((3,), 16, 64))


# FlashInfer, prefill

PREFILLS = [((1, 7, 40), (1, 7, 40)), ((3, 20), (30, 25)), ((1, 1), (9, 40))]


def ragged(flashinfer, o, backend="auto", **changed):
    wrapper = flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8), "NHD", backend=backend
    )
    heads = o.q.shape[1]
    given = {
        "qo_indptr": o.cu_q,
        "kv_indptr": o.cu_k,
        "num_qo_heads": heads,
        "num_kv_heads": heads,
        "head_dim_qk": 192,
    }
    given |= {"head_dim_vo": 128, "causal": True, "sm_scale": SCALE, "q_data_type": o.q.dtype}
    wrapper.plan(**given | changed)
    return wrapper


@pytest.mark.parametrize(("queries", "keys"), PREFILLS)
@pytest.mark.parametrize(("arch", "backend"), [("sm_90", "auto"), ("sm_90", "fa2"), ("sm_100", "cutlass")])
def test_flashinfer_ragged_prefill_is_right(queries, keys, arch, backend):
    with lent("cuda", arch, "flashinfer_attention"):
        o = prefill(queries, keys)
        wrapper = ragged(importlib.import_module("flashinfer"), o, backend)
        close(wrapper.run(o.q, o.k, o.v), o.right)
        given = torch.empty(len(o.q), 4, 128, dtype=torch.bfloat16)
        out, lse = wrapper.run_return_lse(o.q, o.k, o.v, out=given)
        assert out is given and lse.shape == (len(o.q), 4)


def test_flashinfer_ragged_prefill_notices(flashinfer):
    o = prefill((3, 20), (30, 25))
    for wrong in (
        {"q_data_type": "float16"},
        {"qo_indptr": o.cu_q.long()},
        {"qo_indptr": o.cu_q[:-1]},
        {"head_dim_vo": None},
        {"num_qo_heads": 8},
        {"q_data_type": torch.float8_e4m3fn},
        {"backend": "cutlass"},
        {"o_data_type": torch.float32},
    ):
        with pytest.raises(MISUSE):
            ragged(flashinfer, o, **wrong).run(o.q, o.k, o.v)
    for wrong in ({"causal": False}, {"sm_scale": None}, {"qo_indptr": torch.tensor([0, 20, 23]).int()}):
        assert differs(ragged(flashinfer, o, **wrong).run(o.q, o.k, o.v), o.right)
    wrapper = ragged(flashinfer, o)
    for q, k, v in ((o.q[1:], o.k, o.v), (o.q, o.k[:-1], o.v[:-1]), (o.q, o.k, o.k), (o.q, o.k, o.v.half())):
        with pytest.raises(MISUSE):
            wrapper.run(q, k, v)


def by_trtllm(flashinfer, o, **changed):
    given = {
        "query": o.q, "key": o.k, "value": o.v, "workspace_buffer": torch.empty(4 << 20, dtype=torch.uint8),
        "seq_lens": o.cu_k.diff().int(), "max_q_len": o.max_q, "max_kv_len": o.max_k, "bmm1_scale": SCALE,
        "bmm2_scale": 1.0, "o_sf_scale": 1.0, "batch_size": len(o.cu_q) - 1, "window_left": -1,
        "cum_seq_lens_q": o.cu_q, "cum_seq_lens_kv": o.cu_k, "enable_pdl": None, "is_causal": True,
        "return_lse": False,
    }  # fmt: skip
    return flashinfer.prefill.trtllm_ragged_attention_deepseek(**given | changed)


@pytest.mark.parametrize(("queries", "keys"), PREFILLS)
@pytest.mark.parametrize("backend", ["trtllm-gen", "cute-dsl"])
def test_flashinfer_trtllm_ragged_is_right(queries, keys, backend):
    fp8 = torch.float8_e4m3fn
    with lent("cuda", "sm_100", "flashinfer_attention"):
        flashinfer = importlib.import_module("flashinfer")
        for dtype in (fp8,) if backend == "cute-dsl" else (torch.bfloat16, torch.float16, fp8):
            o = prefill(queries, keys, dtype=dtype)
            kind = torch.bfloat16 if dtype == fp8 else dtype
            given, lse = torch.empty(len(o.q), 4, 128, dtype=kind), torch.empty(len(o.q), 4)
            found = by_trtllm(flashinfer, o, backend=backend, out=given, lse=lse, return_lse=True)
            assert found[0] is given and found[1] is lse and torch.isfinite(lse).all()
            close(given, o.right)
            double = {"bmm1_scale": SCALE / 2, "bmm2_scale": 2.0}
            q2 = SimpleNamespace(**vars(o) | {"q": (o.q.float() * 2).to(dtype)})
            close(by_trtllm(flashinfer, q2, backend=backend, **double), 2 * o.right)


def test_flashinfer_trtllm_ragged_notices():
    o, fp8 = prefill((3, 20), (30, 25)), torch.float8_e4m3fn
    wide = torch.empty(55, 4, 320, dtype=torch.bfloat16)
    wide[..., :192], wide[..., 192:] = o.k, o.v
    strided = torch.randn(23, 4, 256).bfloat16()[..., :192]
    small = {"workspace_buffer": torch.empty(1 << 19, dtype=torch.uint8), "return_lse": True}
    with lent("cuda", "sm_100", "flashinfer_attention"):
        flashinfer = importlib.import_module("flashinfer")
        close(by_trtllm(flashinfer, o, key=wide[..., :192], value=wide[..., 192:]), o.right)
        for wrong in (
            {"query": strided}, {"seq_lens": o.cu_q.diff()}, {"seq_lens": o.cu_k.diff().long()}, small,
            {"max_q_len": 19}, {"max_kv_len": 29}, {"batch_size": 1}, {"cum_seq_lens_q": o.cu_q.long()},
            {"value": o.k}, {"value": o.v.half()}, {"out": torch.empty(23, 4, 128)}, {"key": o.k[:-1]},
            {"bmm1_scale": torch.tensor(SCALE).double()}, {"q_seq_lens_cpu": o.cu_q.diff()},
            {"backend": "cute-dsl"}, {"out": torch.empty(22, 4, 128, dtype=torch.bfloat16)},
        ):  # fmt: skip
            with pytest.raises(MISUSE):
                by_trtllm(flashinfer, o, **wrong)
        for wrong in ({"is_causal": False}, {"bmm1_scale": 1.0}, {"cum_seq_lens_q": o.cu_q.flip(0) * 0}):
            assert differs(by_trtllm(flashinfer, o, **wrong), o.right)
        low = prefill((3, 20), (30, 25), dtype=fp8)
        for wrong in (
            {"key": low.k.transpose(0, 1).contiguous().transpose(0, 1)}, {"bmm1_scale": torch.tensor(SCALE)},
            {"out": torch.empty(23, 4, 128).to(fp8)},
        ):  # fmt: skip
            with pytest.raises(MISUSE):
                by_trtllm(flashinfer, low, backend="cute-dsl", **wrong)
    with lent("cuda", "sm_90", "flashinfer_attention"), pytest.raises(MISUSE):
        by_trtllm(importlib.import_module("flashinfer"), o)


def cudnn_plan(o):
    """What the wrapper wants of cuDNN: offsets in elements."""
    return {
        "qo_indptr": o.cu_q * 4 * 192, "kv_indptr": o.cu_k * 4 * 192, "v_indptr": o.cu_k * 4 * 128,
        "o_indptr": o.cu_q * 4 * 128, "seq_lens": o.cu_k.diff(), "seq_lens_q": o.cu_q.diff(),
        "max_token_per_sequence": o.max_q, "max_sequence_kv": o.max_k,
    }  # fmt: skip


@pytest.mark.parametrize(("queries", "keys"), PREFILLS)
def test_flashinfer_ragged_prefill_by_cudnn(queries, keys):
    with lent("cuda", "sm_100", "flashinfer_attention", "cudnn_frontend"):
        flashinfer = importlib.import_module("flashinfer")
        o = prefill(queries, keys)
        given = torch.empty(len(o.q), 4, 128, dtype=torch.bfloat16)
        wrapper = ragged(flashinfer, o, "cudnn", **cudnn_plan(o))
        assert wrapper.run(o.q, o.k, o.v, out=given) is given
        close(given, o.right)
        with pytest.raises(ValueError, match="lse must have shape"):
            wrapper.run_return_lse(o.q, o.k, o.v)
        direct = flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache
        sizes = {"max_token_per_sequence": o.max_q, "max_sequence_kv": o.max_k, "causal": True}
        tokens = {"batch_offsets_q": o.cu_q, "batch_offsets_k": o.cu_k, "batch_offsets_units": "tokens"}
        room = torch.empty(1 << 20, dtype=torch.uint8)
        out, lse = direct(o.q, o.k, o.v, SCALE, room, **sizes, **tokens, return_lse=True)
        close(out, o.right)
        assert lse.shape == (len(queries), o.max_q, 4) and torch.isfinite(lse[-1, : queries[-1]]).all()
        low = prefill(queries, keys, dtype=torch.float8_e4m3fn)
        one = {f"{n}_scale": torch.ones(1, 1, 1, 1) for n in "qkv"} | {"o_data_type": torch.bfloat16}
        close(
            direct(low.q, low.k, low.v, SCALE, room, **sizes, **tokens, **one, return_lse=False)[0], low.right
        )


def test_flashinfer_ragged_prefill_by_cudnn_notices():
    o = prefill((3, 20), (30, 25))
    with lent("cuda", "sm_100", "flashinfer_attention", "cudnn_frontend"):
        flashinfer = importlib.import_module("flashinfer")
        for wrong in (
            {"qo_indptr": o.cu_q}, {"o_indptr": None}, {"seq_lens": None}, {"seq_lens_q": None},
            {"seq_lens": o.cu_k.diff().long()}, {"max_sequence_kv": 29}, {"max_token_per_sequence": 19},
            {"q_data_type": torch.float16},
        ):  # fmt: skip
            with pytest.raises(MISUSE):
                ragged(flashinfer, o, "cudnn", **cudnn_plan(o) | wrong).run(o.q, o.k, o.v)
        for wrong in ({"kv_indptr": o.cu_k}, {"v_indptr": o.cu_k}, {"causal": False}, {"sm_scale": None}):
            found = ragged(flashinfer, o, "cudnn", **cudnn_plan(o) | wrong).run(o.q, o.k, o.v)
            assert differs(found, o.right)
        low = prefill((3, 20), (30, 25), dtype=torch.float8_e4m3fn)
        with pytest.raises(MISUSE):
            ragged(flashinfer, low, "cudnn", **cudnn_plan(low)).run(low.q, low.k, low.v)
    with lent("cuda", "sm_100", "flashinfer_attention"), pytest.raises(NotImplementedError, match="cubin"):
        ragged(importlib.import_module("flashinfer"), o, "cudnn", **cudnn_plan(o)).run(o.q, o.k, o.v)


def test_flashinfer_ragged_wrapper_by_cute_dsl_is_square():
    o = prefill((3, 20), (30, 25))
    k, q = o.k[..., :128].contiguous(), o.q[..., :128].contiguous()
    with lent("cuda", "sm_100", "flashinfer_attention"):
        flashinfer = importlib.import_module("flashinfer")
        with pytest.raises(NotImplementedError, match="head_dim_vo == head_dim_qk"):
            ragged(flashinfer, o, "cute-dsl")
        square = {"head_dim_qk": 128, "head_dim_vo": 128}
        found = ragged(flashinfer, o, "cute-dsl", **square).run_return_lse(q, k, o.v)
        right = ragged(flashinfer, o, "fa2", **square).run_return_lse(q, k, o.v)
        torch.testing.assert_close(found, right)


# FlashAttention


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
    close(fa3_decode(fa3, o), o.right)
    close(fa3_decode(fa3, o, scheduler_metadata=fa3_metadata(fa3, o, page)), o.right)


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


# cuDNN


@pytest.fixture
def cudnn():
    yield from library("cudnn", "cudnn_frontend")


def graph(cudnn, o, fp8=None, alter=lambda tensors: None, **changed):
    """A ragged graph, built, and what it is executed with; out is poisoned."""
    kind = cudnn.data_type
    g = cudnn.pygraph(
        handle=cudnn.create_handle(),
        io_data_type=kind.BFLOAT16,
        intermediate_data_type=kind.FLOAT,
        compute_data_type=kind.FLOAT,
    )
    b, heads = len(o.cu_q) - 1, o.q.shape[1]
    out = torch.full((len(o.q), heads, 128), math.nan, dtype=torch.bfloat16)
    pack, made = {}, {}

    def ragged(name, data, cu, longest, t=None):
        width = data.shape[2]
        offsets = (cu.long() * heads * width).view(-1, 1, 1, 1)
        ragged = g.tensor(dim=offsets.shape, stride=(1, 1, 1, 1), data_type=kind.INT64)
        dim, stride = (b, heads, longest, width), (longest * heads * width, width, heads * width, 1)
        if t is None:
            t = g.tensor(dim=dim, stride=stride, data_type=data.dtype, name=name)
        else:
            t.set_output(True).set_dim(dim).set_stride(stride).set_data_type(data.dtype)
        t.set_ragged_offset(ragged)
        pack[t], pack[ragged], made[name] = data, offsets, t
        return t

    def lengths(cu):
        t = g.tensor(dim=(b, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kind.INT32)
        pack[t] = (cu[1:] - cu[:-1]).view(-1, 1, 1, 1)
        return t

    operands = {"q": o.q, "k": o.k, "v": o.v} if fp8 is None else fp8
    given = {
        n: ragged(n, t, *((o.cu_q, o.max_q) if n == "q" else (o.cu_k, o.max_k))) for n, t in operands.items()
    }
    given |= {
        "attn_scale": SCALE,
        "use_padding_mask": True,
        "seq_len_q": lengths(o.cu_q),
        "seq_len_kv": lengths(o.cu_k),
    }
    given |= {"use_causal_mask_bottom_right": True, "generate_stats": False}
    if fp8 is None:
        y, stats = g.sdpa(**given | changed)
    else:
        for name, value in o.scales.items():
            given[name] = g.tensor(dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kind.FLOAT)
            pack[given[name]] = torch.tensor([value])
        y, stats, *_ = g.sdpa_fp8(**given | changed)
    assert stats is None
    ragged("o", out, o.cu_q, o.max_q, y)
    alter(made)
    g.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(g.get_workspace_size(), dtype=torch.uint8)
    g.execute(pack, workspace)
    return out


@pytest.mark.parametrize(("queries", "keys"), PREFILLS)
def test_cudnn_is_right(cudnn, queries, keys):
    o = prefill(queries, keys)
    close(graph(cudnn, o), o.right)


def test_cudnn_notices(cudnn):
    o = prefill((3, 20), (30, 25))
    bottom_right = cudnn.diagonal_alignment.BOTTOM_RIGHT
    band = {
        "diagonal_alignment": bottom_right,
        "diagonal_band_right_bound": 0,
        "use_causal_mask_bottom_right": False,
    }
    close(graph(cudnn, o, **band), o.right)
    for wrong in (
        {"use_causal_mask": True, "use_causal_mask_bottom_right": False},
        {"use_causal_mask_bottom_right": False},
        {"attn_scale": None},
    ):
        assert differs(graph(cudnn, o, **wrong), o.right), wrong
    for wrong in (
        {"use_padding_mask": False},
        {"seq_len_kv": None},
        {"is_inference": True},
        {"use_causal_mask": True},
    ):
        with pytest.raises(RuntimeError):
            graph(cudnn, o, **wrong)
    for alter in (
        lambda made: made["o"].set_output(False),
        lambda made: made["v"].set_ragged_offset(made["k"].ragged),
        lambda made: made["k"].set_data_type(torch.float16),
        lambda made: made["q"].set_stride((4 * 192, 192 * made["q"].dim[2], 192, 1)),
    ):
        try:
            out = graph(cudnn, o, alter=alter)
        except RuntimeError:
            continue
        assert differs(out, o.right)


def test_cudnn_of_fp8_is_blackwell():
    o = prefill((3, 20), (30, 25))
    scale = 0.02
    fp8 = {n: (getattr(o, n).float() / scale).to(torch.float8_e4m3fn) for n in "qkv"}
    o.scales = {
        "descale_q": scale,
        "descale_k": scale,
        "descale_v": scale,
        "descale_s": 1 / 256,
        "scale_s": 256.0,
        "scale_o": 1.0,
    }
    with lent("cuda", "sm_100", "cudnn_frontend"):
        out = graph(importlib.import_module("cudnn"), o, fp8)
        torch.testing.assert_close(out.float(), o.right, atol=0.3, rtol=0.3)
    with lent("cuda", "sm_90", "cudnn_frontend"):
        cudnn = importlib.import_module("cudnn")
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="Blackwell"):
            graph(cudnn, o, fp8)


@pytest.mark.parametrize(
    ("double", "module", "version"),
    [
        ("flash_mla", "flash_mla", "1.0.0+9241ae3"),
        ("flash_mla_2025", "flash_mla", "1.0.0+ebf3064"),
        ("flashinfer_attention", "flashinfer", "0.6.18"),
        ("flash_attn", "flash_attn", "2.8.4"),
        ("flash_attn_3", "flash_attn_interface", "3.0.0"),
        ("flash_attn_4", "flash_attn.cute", "4.0.0b27"),
        ("cudnn_frontend", "cudnn", "1.23.0"),
    ],
)
def test_each_is_found_as_the_library_would_be(double, module, version):
    with lent("cuda", "sm_90", double) as here:
        assert here.library(module) and platform.version(module) == version
