"""The double of FlashInfer's ragged prefill against plain torch, and that each wrong use is noticed."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from tests.doubles import lent
from tests.support.attention_problems import MISUSE, PREFILLS, SCALE, close, differs, library, prefill


@pytest.fixture
def flashinfer():
    yield from library("flashinfer", "flashinfer_attention")


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
        for unread in (
            {"num_kv_heads": 3},
            {"head_dim_qk": 0},
            {"v_indptr": cudnn_plan(o)["v_indptr"].long()},
        ):
            close(ragged(flashinfer, o, "cudnn", **cudnn_plan(o) | unread).run(o.q, o.k, o.v), o.right)
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
