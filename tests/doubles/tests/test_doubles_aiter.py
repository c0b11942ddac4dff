"""The doubles of AITER, and of what SGLang puts around it, against plain arithmetic in fp64."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch

from kernels import platform
from tests.doubles import lent
from tests.support.aiter_attention import SCALE, close, on
from tests.support.aiter_quantised import column_major, quantised, weights

D, V = 576, 512
REFUSED = (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError, IndexError)


def attention(q, keys, scale, causal=True):
    """fp64 [Q, H, 512] of q [Q, H, 576] over keys [n, 576]; the last query sees the last key."""
    q, keys = q.double(), keys.double()
    scores = torch.einsum("qhd,kd->qhk", q, keys) * scale
    hidden = torch.ones(len(q), len(keys), dtype=torch.bool).triu(len(keys) - len(q) + 1)
    scores = scores.masked_fill(hidden[:, None] & causal, float("-inf"))
    return torch.einsum("qhk,kd->qhd", scores.softmax(-1), keys[:, :V]), scores.logsumexp(-1)


class Sequences:
    """Sequences scattered over a cache of single tokens whose row 0 no sequence names."""

    def __init__(self, lengths, heads, qlen=1, q=torch.bfloat16, kv=torch.bfloat16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        total = sum(lengths)
        self.lengths, self.heads, self.qlen = lengths, heads, qlen
        self.q = torch.randn(len(lengths) * qlen, heads, D, generator=generator).to(q)
        self.kv = torch.randn(total + 9, D, generator=generator).to(kv)
        self.pages = (1 + torch.randperm(total + 8, generator=generator)[:total]).int()
        self.indptr = torch.tensor([0, *lengths]).cumsum(0).int()
        self.starts = (torch.arange(len(lengths) + 1) * qlen).int()
        self.o = torch.full((len(lengths) * qlen, heads, V), float("nan"), dtype=torch.bfloat16)

    def wanted(self, q_scale=1.0, kv_scale=1.0):
        outs, lses = [], []
        for b in range(len(self.lengths)):
            at = self.pages[self.indptr[b] : self.indptr[b + 1]].long()
            rows = self.q[b * self.qlen : (b + 1) * self.qlen].double()
            out, lse = attention(rows, self.kv.double()[at], SCALE * q_scale * kv_scale)
            outs.append(out * kv_scale)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)


def assert_wrong(call, right):
    """The call raises, or its numbers are not the right ones."""
    try:
        out = call()
    except REFUSED:
        return
    assert out.shape != right.shape or not close(out, right)


def poisoned(kv: torch.Tensor, row: int) -> torch.Tensor:
    kv = kv.clone()
    kv[row] = torch.tensor(float("nan")).to(kv.dtype)
    return kv


# MLA decode in assembly, as sglang 0.5.23 plans and calls it (layers/attention/aiter_backend.py).


def planned(aiter, case, max_split=32, **changed):
    """make_mla_decode_meta_data_buffer and make_mla_meta_data: no page size, not causal."""
    kinds = (case.q.dtype, case.kv.dtype)
    info = aiter.get_mla_metadata_info_v1(
        len(case.lengths), case.qlen, case.heads, *kinds, is_sparse=False, fast_mode=False,
        num_kv_splits=max_split, intra_batch_mode=True,
    )  # fmt: skip
    meta, work_indptr, work_info, *reduce = (torch.empty(shape, dtype=kind).fill_(77) for shape, kind in info)
    options = {
        "kv_granularity": 16, "max_seqlen_qo": case.qlen, "uni_seqlen_qo": case.qlen, "fast_mode": False,
        "max_split_per_batch": max_split, "intra_batch_mode": True, "is_cp_round_robin": False,
        "dtype_q": kinds[0], "dtype_kv": kinds[1],
    }  # fmt: skip
    last = torch.ones(len(case.lengths), dtype=torch.int32)
    aiter.get_mla_metadata_v1(
        case.starts, case.indptr, last, case.heads, 1, False, meta, work_info, work_indptr, *reduce,
        **(options | changed),
    )  # fmt: skip
    names = "work_meta_data work_indptr work_info_set reduce_indptr reduce_final_map reduce_partial_map"
    return dict(zip(names.split(), (meta, work_indptr, work_info, *reduce), strict=True))


def decoded(aiter, case, plan, kv=None, splits=32, **changed):
    given = {
        "qo_indptr": case.starts, "kv_indptr": case.indptr, "kv_indices": case.pages,
        "kv_last_page_lens": torch.ones(len(case.lengths), dtype=torch.int32), "max_seqlen_q": case.qlen,
        "sm_scale": SCALE, "logit_cap": 0.0, "q_scale": torch.tensor(0.5), "kv_scale": torch.tensor(0.5),
        "intra_batch_mode": True, "num_kv_splits": splits,
    }  # fmt: skip
    kv = case.kv if kv is None else kv
    case.o.fill_(float("nan"))
    aiter.mla.mla_decode_fwd(case.q, kv.view(-1, 1, 1, D), case.o, **(given | plan | changed))
    return case.o


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("max_split", [32, 64])
def test_sglangs_persistent_mode(arch, max_split):
    with on(arch) as aiter:
        fp8 = aiter.dtypes.fp8
        case = Sequences([700, 196, 403], 16, q=fp8, kv=fp8)
        plan = planned(aiter, case, max_split)
        assert plan["reduce_indptr"][-1] > 3  # split
        assert close(decoded(aiter, case, plan, splits=max_split), case.wanted(0.5, 0.5)[0])


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_nan_in_row_0_spreads_to_every_request_of_a_persistent_call(arch):
    with on(arch) as aiter:
        fp8 = aiter.dtypes.fp8
        case = Sequences([700, 196, 403], 16, q=fp8, kv=fp8)
        bytes_ = case.kv.view(torch.uint8).clone()
        bytes_[0] = 0x80 if arch == "gfx942" else 0x7F
        out = decoded(aiter, case, planned(aiter, case), kv=bytes_.view(fp8))
        assert out.isnan().all(dim=-1).all()
        bytes_[0] = 0
        assert close(
            decoded(aiter, case, planned(aiter, case), kv=bytes_.view(fp8)), case.wanted(0.5, 0.5)[0]
        )


def test_a_persistent_call_refuses_or_errs():
    with on("gfx950") as aiter:
        fp8 = aiter.dtypes.fp8
        case = Sequences([700, 196], 16, q=fp8, kv=fp8)
        plan, right = planned(aiter, case), case.wanted(0.5, 0.5)[0]
        for wrong in (
            {"kv_indices": case.pages.long()}, {"kv_indptr": case.indptr.long()}, {"work_info_set": None},
            {"work_info_set": plan["work_info_set"].clone()}, {"q_scale": None},
            {"kv_scale": torch.tensor(0.5).double()}, {"kv_indices": case.pages.flip(0)},
        ):  # fmt: skip
            assert_wrong(lambda wrong=wrong: decoded(aiter, case, plan, **wrong), right)
        with pytest.raises(ValueError, match="0 splits"):  # v1_0_device.cuh divides by tokens // 196
            planned(aiter, Sequences([100], 16, q=fp8, kv=fp8))
        for wrong in {"uni_seqlen_qo": -1}, {"intra_batch_mode": False}, {"kv_granularity": 24}:
            with pytest.raises(REFUSED):
                planned(aiter, case, **wrong)


# v0.1.9: another planner's signature, another decode's, the same arithmetic.


def planned_019(aiter, case, fast=True, **changed):
    kinds = (case.q.dtype, case.kv.dtype)
    info = aiter.get_mla_metadata_info_v1(
        len(case.lengths), 1, case.heads, *kinds, is_sparse=False, fast_mode=fast, intra_batch_mode=not fast
    )
    meta, work_indptr, work_info, *reduce = (torch.empty(shape, dtype=kind).fill_(77) for shape, kind in info)
    options = {
        "kv_granularity": 16, "max_seqlen_qo": 1, "uni_seqlen_qo": 1, "fast_mode": fast,
        "max_split_per_batch": 32, "intra_batch_mode": not fast, "dtype_q": kinds[0], "dtype_kv": kinds[1],
    }  # fmt: skip
    aiter.get_mla_metadata_v1(
        case.starts, case.indptr, case.heads, 1, True, meta, work_info, work_indptr, *reduce,
        **(options | changed),
    )  # fmt: skip
    names = "work_meta_data work_indptr work_info_set reduce_indptr reduce_final_map reduce_partial_map"
    return dict(zip(names.split(), (meta, work_indptr, work_info, *reduce), strict=True))


@pytest.fixture(params=["gfx942", "gfx950"])
def aiter_019(request):
    with lent("rocm", request.param, "aiter_attention", "aiter_attention_019"):
        yield importlib.import_module("aiter")


def test_what_is_installed(aiter_019):
    assert platform.version("aiter") == "0.1.9"
    for name in ("get_mla_metadata_v1", "mla_decode_stage1_asm_fwd", "mla_reduce_v1"):
        kinds = [p.kind for p in inspect.signature(getattr(aiter_019, name)).parameters.values()]
        assert kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD], name
    names = [a.name for a in torch.ops.aiter.get_mla_metadata_v1.default._schema.arguments]
    assert names[:3] == ["seqlens_qo_indptr", "seqlens_kv_indptr", "num_heads_per_head_k"]
    assert "page_size" not in names
    assert "num_kv_splits" not in [a.name for a in torch.ops.aiter.mla_reduce_v1.default._schema.arguments]
    text = Path(importlib.import_module("aiter.ops.attention").__file__).read_text()
    assert "def get_mla_metadata_v1(" in text


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_decode_019(aiter_019, heads, fp8):
    kind = aiter_019.dtypes.fp8 if fp8 else torch.bfloat16
    case = Sequences([700, 30, 403], heads, q=kind, kv=kind)
    right = case.wanted(*((0.5, 0.5) if fp8 else ()))[0]
    assert close(decoded(aiter_019, case, {}, splits=None), right)
    assert close(decoded(aiter_019, case, {}, splits=4), right)
    plan = planned_019(aiter_019, case)
    assert close(decoded(aiter_019, case, plan), right)
    for wrong in (
        {"kv_indices": case.pages.long()}, {"page_size": 1}, {"causal": True}, {"max_seqlen_q": 2},
        {"work_indptr": None}, {"kv_indices": case.pages.flip(0)},
    ):  # fmt: skip
        assert_wrong(lambda wrong=wrong: decoded(aiter_019, case, plan, **wrong), right)


def test_sglangs_plan_019():
    with lent("rocm", "gfx942", "aiter_attention", "aiter_attention_019"):
        aiter = importlib.import_module("aiter")
        case = Sequences([700, 30], 16, q=aiter.dtypes.fp8, kv=aiter.dtypes.fp8)
        plan = planned_019(aiter, case, fast=False)
        assert close(decoded(aiter, case, plan), case.wanted(0.5, 0.5)[0])
        for wrong in {"page_size": 1}, {"topk": 64}, {"uni_seqlen_qo": 2}, {"kv_granularity": 24}:
            with pytest.raises(REFUSED):
                planned_019(aiter, case, **wrong)
        with pytest.raises(RuntimeError, match="element type should be int"):
            case.indptr = case.indptr.long()
            planned_019(aiter, case)


# MLA decode in Gluon.


def gluon(case, qlen=1, table=False, **changed):
    from aiter.ops.triton.gluon.mla_gluon import mla_gluon

    shape = (len(case.lengths), qlen, case.heads) if qlen > 1 else (len(case.lengths), case.heads)
    q_nope, q_pe = torch.split(case.q, [V, 64], dim=-1)  # strided, as SGLang passes them
    case.o.fill_(float("nan"))
    pages, infos = case.pages, case.indptr
    if table:
        pages = torch.zeros(len(case.lengths), 800, dtype=torch.int32)
        for b, length in enumerate(case.lengths):
            pages[b, :length] = case.pages[case.indptr[b] : case.indptr[b + 1]]
        infos = torch.tensor(case.lengths, dtype=torch.int32)
    given = {
        "q_nope": q_nope.view(*shape, V), "q_pe": q_pe.view(*shape, 64), "kv_c": case.kv,
        "o": case.o.view(*shape, V), "page_table": pages, "seq_info": infos, "sm_scale": SCALE, "k_pe": None,
        "kv_pe_offset": V, "use_2d_view": table, "kv_scale": 1.0, "min_kv_seq_len": 1,
    }  # fmt: skip
    _, lse = mla_gluon(**(given | changed))
    return case.o, lse


@pytest.mark.parametrize(("heads", "qlen"), [(12, 1), (16, 3), (40, 1)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
def test_gluon(heads, kind, qlen):
    with on("gfx950"):
        case = Sequences([700, 30, 129], heads, qlen, kv=kind)
        kv_scale = 1.0 if kind == torch.bfloat16 else 0.5
        right, right_lse = case.wanted(kv_scale=kv_scale)
        for table in (False, True):
            out, lse = gluon(case, qlen, table, kv_scale=kv_scale, return_lse=True)
            assert close(out, right) and lse.shape == (3, qlen, heads)
            assert (lse.view(-1, heads) - right_lse).abs().max() < 1e-3
        assert close(gluon(case, qlen, kv_c=poisoned_bytes(case.kv, 0), kv_scale=kv_scale)[0], right)
        latent, rope = case.kv[:, :V].contiguous(), case.kv[:, V:].contiguous()
        apart = gluon(case, qlen, kv_c=latent, k_pe=rope, kv_pe_offset=0, kv_scale=kv_scale)
        assert apart[1] is None and close(apart[0], right)


def poisoned_bytes(kv: torch.Tensor, row: int) -> torch.Tensor:
    if kv.element_size() > 1:
        return poisoned(kv, row)
    raw = kv.view(torch.uint8).clone()
    raw[row] = 0x7F
    return raw.view(kv.dtype)


def test_gluon_refuses_or_errs():
    with on("gfx950"):
        case = Sequences([300, 30], 16)
        right = case.wanted()[0]
        for wrong in (
            {"page_table": case.pages.long()}, {"seq_info": case.indptr.long()}, {"use_2d_view": True},
            {"kv_pe_offset": 0}, {"kv_c": case.kv.half()}, {"q_pe": case.q[..., V:].float()},
            {"kv_scale": torch.tensor(1.0)}, {"kv_scale": 2.0}, {"sm_scale": 1.0}, {"o": case.o.float()},
            {"q_nope": case.q[..., :V].transpose(1, 2).contiguous().transpose(1, 2)},
            {"page_table": case.pages + 20}, {"kv_c": case.kv.to(torch.float8_e4m3fnuz)},
            {"page_table": case.pages.flip(0)}, {"kv_c": case.kv[:, : V + 32].clone()},
        ):  # fmt: skip
            assert_wrong(lambda wrong=wrong: gluon(case, **wrong)[0], right)
        with pytest.raises(AssertionError, match="divisible by 64"):
            gluon(Sequences([300, 30], 128))
    with on("gfx942"), pytest.raises(AssertionError, match="requires gfx950"):
        gluon(case)


def test_gluon_of_128_heads_takes_64_requests_of_many_tokens():
    with on("gfx950"):
        case = Sequences([200] * 64, 64, qlen=4)  # one split fills the device
        assert close(gluon(case, qlen=4, min_kv_seq_len=200)[0], case.wanted()[0])
        with pytest.raises(AssertionError, match="min_kv_seq_len"):
            gluon(case, qlen=4, min_kv_seq_len=193)
        with pytest.raises(ValueError, match="three blocks"):
            gluon(Sequences([400] * 64, 64), min_kv_seq_len=800)


# GEMM: Triton over a preshuffled weight, and SGLang's fused kernel for few tokens.


def dequantised(x, xs, w, ws):
    a = x.double() * xs.double().repeat_interleave(128, 1)[:, : x.shape[1]]
    rows = ws.double().repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
    return a @ (w.double() * rows).T


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("splits", [1, 2])
def test_preshuffled_gemm(arch, splits):
    with lent("rocm", arch, "aiter_gemm_moe"):
        from aiter.ops.shuffle import shuffle_weight
        from aiter.ops.triton.gemm.basic import gemm_a8w8_blockscale as module

        (x, xs), (w, ws) = quantised((5, 512), arch), weights((320, 512), arch)
        right, n, k = dequantised(x, xs, w, ws), *w.shape
        config = module._get_config(5, n, k, True)[0] | {"NUM_KSPLIT": splits}

        def call(weight=None, scale=None, w_scale=None, **more):
            weight = shuffle_weight(w).view(n // 16, k * 16) if weight is None else weight
            scale = column_major(xs) if scale is None else scale
            given = {"config": dict(config)} | more
            return module.gemm_a8w8_blockscale_preshuffle(
                x, weight, scale, ws if w_scale is None else w_scale, **given
            )

        assert close(call(), right)
        assert close(call(scale=xs.t().contiguous().t(), is_x_scale_tranposed=False), right)
        wide = torch.zeros(n // 16, k * 16 + 64, dtype=w.dtype)[:, : k * 16]
        assert close(call(wide.copy_(shuffle_weight(w).view(n // 16, k * 16))), right)
        parts = call(skip_reduce=True)
        assert parts.shape == ((splits, 5, n) if splits > 1 else (5, n))
        for wrong in (
            {"weight": w.view(n // 16, k * 16)}, {"weight": shuffle_weight(w)}, {"scale": xs},
            {"scale": xs.t().contiguous().t()}, {"is_x_scale_tranposed": False}, {"w_scale": ws.flip(0)},
            {"w_scale": ws.t()}, {"backend": "gluon"}, {"config": config | {"BLOCK_SIZE_K": 256}},
            {"y": torch.empty(4, n, dtype=torch.bfloat16)},
        ):  # fmt: skip
            assert_wrong(lambda wrong=wrong: call(**wrong), right)


def test_the_preshuffled_tables_are_of_their_own():
    with lent("rocm", "gfx950", "aiter_gemm_moe"):
        from aiter.ops.triton.gemm.basic.gemm_a8w8_blockscale import _get_config

        config, tuned = _get_config(4, 2112, 7168, True)
        assert tuned and config["NUM_KSPLIT"] == 14 and 7168 % (14 * config["BLOCK_SIZE_K"]) == 0
        assert _get_config(4, 2112, 7168)[1] is False
        config, tuned = _get_config(4, 384, 512, True)
        assert not tuned and config["BLOCK_SIZE_N"] == 16


def test_sglangs_gemm_for_few_tokens():
    with lent("rocm", "gfx950", "aiter_gemm_moe", "sglang"):
        from aiter.ops.shuffle import shuffle_weight
        from sglang.kernels.ops.gemm.smallm_fp8_blockscale_gfx950 import try_smallm_fp8_bs_linear

        w, ws = weights((4096, 1024), "gfx950")
        x = torch.randn(7, 1024).bfloat16()
        full = ws.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        right, shuffled = x.double() @ (w.double() * full).T, shuffle_weight(w)
        out = try_smallm_fp8_bs_linear(x, shuffled, ws)
        assert out.dtype == torch.bfloat16
        assert (out - right).norm() < 0.04 * right.norm()  # the activations are rounded to FP8
        for arguments in (
            (x, w, ws), (x.float(), shuffled, ws), (x.t().contiguous().t(), shuffled, ws),
            (x.repeat(5, 1), shuffled, ws), (x, shuffled, ws.t()), (x, shuffled.clone(), ws),
        ):  # fmt: skip
            assert try_smallm_fp8_bs_linear(*arguments) is None
        with pytest.raises(RuntimeError, match="fp32"):
            try_smallm_fp8_bs_linear(x, shuffled, ws.double())


# MoE: the sort and CK's two stages.


def sort_of(ids, routed, experts, block=32, **more):
    from aiter.fused_moe import moe_sorting

    return moe_sorting(ids, routed, experts, 128, torch.bfloat16, block_size=block, **more)


@pytest.mark.parametrize("policy", [0, 1, 2])
def test_a_policy_changes_the_sorts_workspace_alone(policy):
    with lent("rocm", "gfx942", "aiter_gemm_moe"):
        import aiter

        routed, ids = torch.rand(6, 8).topk(2)
        ids = ids.int()
        right, found = sort_of(ids, routed, 8), sort_of(ids, routed, 8, dispatch_policy=policy)
        count = int(right[3][0])
        assert torch.equal(found[0][:count], right[0][:count]) and torch.equal(found[3], right[3])
        size = aiter.moe_sorting_opus_get_workspace_size(6, 8, 2, policy)
        assert (size > 0) == (policy == 2)
        assert aiter.moe_sorting_opus_get_workspace_size(4096, 256, 8, 0) > 0
        given = (ids, routed, *(t.clone() for t in right), 8, 32)
        for workspace in (None, torch.empty(max(size - 1, 0), dtype=torch.uint8)):
            call = (*given, None, None, workspace, policy)
            if policy < 2:
                aiter.moe_sorting_opus_fwd(*call)
            else:
                with pytest.raises(RuntimeError, match="works in"):
                    aiter.moe_sorting_opus_fwd(*call)


@pytest.mark.parametrize(("tokens", "block"), [(6, 32), (40, 16)])
def test_sglangs_sort_is_aiters(tokens, block):
    with lent("rocm", "gfx950", "aiter_gemm_moe", "sglang"):
        from aiter import fused_moe
        from sglang.kernels.ops.moe.moe_sorting_small import apply_aiter_small_moe_sort_patch

        routed, ids = torch.rand(tokens, 8).topk(2)
        ids = ids.int()
        right, before = sort_of(ids, routed, 8, block), fused_moe._moe_sorting_impl
        apply_aiter_small_moe_sort_patch()
        assert fused_moe._moe_sorting_impl is not before
        found = sort_of(ids, routed, 8, block, dispatch_policy=2)
        count = int(right[3][0])
        for i in (0, 1):
            assert torch.equal(found[i][:count], right[i][:count])
        assert torch.equal(found[2][: count // block], right[2][: count // block])
        assert torch.equal(found[3], right[3]) and not found[4].any() and found[4].shape == (tokens, 128)
        mask = torch.ones(8, dtype=torch.int32)
        assert torch.equal(sort_of(ids, routed, 8, block, expert_mask=mask)[3], right[3])  # AITER's own
        with pytest.raises(RuntimeError):
            sort_of(ids, routed.double(), 8, block)
        with pytest.raises(RuntimeError):
            sort_of(ids + 8, routed, 8, block)


def test_non_temporal_loads_change_no_result_of_ck():
    with lent("rocm", "gfx950", "aiter_gemm_moe"):
        import aiter
        from aiter import QuantType
        from aiter.ops.shuffle import shuffle_weight

        (w1, s1), (w2, s2) = weights((4, 512, 256), "gfx950"), weights((4, 256, 256), "gfx950", 9)
        x, xs = quantised((6, 256), "gfx950")
        routed, ids = torch.rand(6, 4).topk(2)
        ids, shuffled = ids.int(), (shuffle_weight(w1), shuffle_weight(w2))
        sort = sort_of(ids, routed, 4, 16)[:4]
        full = [(w.double() * s.double().repeat_interleave(128, 1).repeat_interleave(128, 2))
                for w, s in ((w1, s1), (w2, s2))]  # fmt: skip
        a = x.double() * xs.double().repeat_interleave(128, 1)
        right = torch.empty(6, 2, 256, dtype=torch.float64)
        for token in range(6):
            for place in range(2):
                gate, up = (full[0][ids[token, place]] @ a[token]).chunk(2)
                right[token, place] = torch.nn.functional.silu(gate) * up

        def call(nt, **more):
            out = torch.full((6, 2, 256), float("nan"), dtype=torch.bfloat16)
            given = {"w1_scale": s1, "a1_scale": xs, "block_m": 16, "quant_type": QuantType.per_1x128}
            return aiter.ck_moe_stage1_fwd(
                x, *shuffled, sort[0], sort[2], sort[3], out, 2, use_non_temporal_load=nt, **(given | more)
            )

        for nt in (False, True):
            assert close(call(nt), right)
        assert not close(call(False, a1_scale=column_major(xs)), right)
        assert not close(call(False, w1_scale=s1.transpose(1, 2).contiguous().view(s1.shape)), right)
        kinds = [p.kind for p in inspect.signature(aiter.ck_moe_stage1).parameters.values()]
        assert kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
