"""The double of FlashInfer's MLA decoding against plain torch, and that each wrong use is noticed."""

import math

import pytest
import torch

from tests.support.attention_problems import DECODES, MISUSE, SCALE, close, decode, differs, library


@pytest.fixture
def flashinfer():
    yield from library("flashinfer", "flashinfer_attention")


@pytest.fixture
def flashinfer_sm_100():
    yield from library("flashinfer", "flashinfer_attention", arch="sm_100")


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
