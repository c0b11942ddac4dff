"""The double of AITER's MLA decoding: right against plain torch, and every wrong use is refused or seen."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from tests.support.aiter_attention import SCALE, close, on

D, V = 576, 512


@pytest.fixture(params=["gfx942", "gfx950"])
def aiter(request):
    with on(request.param) as aiter:
        yield aiter


class Decode:
    """One decode problem: contiguous sequences scattered over pages, and its plain answer."""

    def __init__(self, aiter, lengths, heads, page=1, q_fp8=False, kv_fp8=False, qlen=1, seed=0):
        torch.manual_seed(seed)
        fp8, bf16 = aiter.dtypes.fp8, torch.bfloat16
        self.aiter, self.heads, self.page, self.qlen, self.lengths = aiter, heads, page, qlen, lengths
        counts = torch.tensor([-(-n // page) for n in lengths])
        used = int(counts.sum())
        self.q = torch.randn(len(lengths) * qlen, heads, D).to(fp8 if q_fp8 else bf16)
        self.kv = torch.randn(used + 3, page, 1, D).to(fp8 if kv_fp8 else bf16)
        self.o = torch.full((len(lengths) * qlen, heads, V), float("nan"), dtype=bf16)
        self.arrays = {
            "qo_indptr": torch.arange(len(lengths) + 1, dtype=torch.int32) * qlen,
            "kv_indptr": torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
            "kv_indices": torch.randperm(used + 3)[:used].int(),
            "kv_last_page_lens": torch.tensor([(n - 1) % page + 1 for n in lengths], dtype=torch.int32),
        }
        self.scales = {"q_scale": torch.tensor([0.5]), "kv_scale": torch.tensor([2.0])}
        self.times = (0.5 if q_fp8 else 1.0), (2.0 if kv_fp8 else 1.0)

    def call(self, q=None, o=None, kv=None, **changed):
        keywords = {
            "max_seqlen_q": self.qlen,
            "page_size": self.page,
            "nhead_kv": 1,
            "sm_scale": SCALE,
        } | self.arrays
        target = self.o if o is None else o
        self.returned = self.aiter.mla.mla_decode_fwd(
            q=self.q if q is None else q, kv_buffer=self.kv if kv is None else kv, o=target,
            **(keywords | self.scales | changed),
        )  # fmt: skip
        return target

    def plan(self, **changed):
        """The metadata of the persistent path, as vLLM makes it; SGLang's with fast_mode=False."""
        keywords = {"fast_mode": True, "intra_batch_mode": False} | changed.pop("mode", {})
        info = self.aiter.get_mla_metadata_info_v1(
            len(self.lengths), self.qlen, self.heads, self.q.dtype, self.kv.dtype, is_sparse=False, **keywords
        )
        names = [
            "work_meta_data",
            "work_indptr",
            "work_info_set",
            "reduce_indptr",
            "reduce_final_map",
            "reduce_partial_map",
        ]
        made = {n: torch.zeros(shape, dtype=kind) for n, (shape, kind) in zip(names, info, strict=True)}
        arrays = [self.arrays[n] for n in ("qo_indptr", "kv_indptr", "kv_last_page_lens")]
        options = {
            "page_size": self.page, "kv_granularity": max(self.page, 16), "max_seqlen_qo": self.qlen,
            "uni_seqlen_qo": self.qlen, "max_split_per_batch": 32,
            "dtype_q": self.q.dtype, "dtype_kv": self.kv.dtype,
        }  # fmt: skip
        self.aiter.get_mla_metadata_v1(
            *arrays, self.heads, 1, True, made["work_meta_data"], made["work_info_set"], made["work_indptr"],
            made["reduce_indptr"], made["reduce_final_map"], made["reduce_partial_map"],
            **(options | keywords | changed),
        )  # fmt: skip
        return made

    def wanted(self):
        outs = []
        indptr, pages = self.arrays["kv_indptr"].tolist(), self.arrays["kv_indices"].tolist()
        for b, n in enumerate(self.lengths):
            keys = torch.cat([self.kv.float()[pages[i], :, 0] for i in range(indptr[b], indptr[b + 1])])[:n]
            for token in range(self.qlen):
                seen = keys[: n - self.qlen + 1 + token]
                q = self.q[b * self.qlen + token].float()
                scores = q @ seen.T * (SCALE * self.times[0] * self.times[1])
                outs.append(scores.softmax(-1) @ seen[:, :V] * self.times[1])
        return torch.stack(outs)


@pytest.mark.parametrize(("lengths", "heads", "page"), [
    ([1], 16, 1), ([70, 3], 16, 1), ([33, 64, 5], 128, 1), ([70, 16], 16, 16), ([70, 65], 128, 64),
])  # fmt: skip
def test_decode_in_bf16(aiter, lengths, heads, page):
    case = Decode(aiter, lengths, heads, page)
    assert close(case.call(), case.wanted())
    case.o.fill_(float("nan"))
    assert close(case.call(**case.plan()), case.wanted())


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("heads", [16, 128])
def test_decode_by_any_number_of_splits(aiter, heads, splits):
    case = Decode(aiter, [70, 5, 130], heads)
    assert close(case.call(num_kv_splits=splits), case.wanted())


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("persistent", [False, True])
def test_decode_in_fp8(aiter, heads, persistent):
    case = Decode(aiter, [70, 3], heads, q_fp8=True, kv_fp8=True)
    assert close(case.call(**(case.plan() if persistent else {})), case.wanted())


@pytest.mark.parametrize("heads", [16, 128])
def test_bf16_queries_over_an_fp8_cache_are_persistent_only(aiter, heads):
    case = Decode(aiter, [70, 3], heads, kv_fp8=True)
    assert close(case.call(**case.plan()), case.wanted())
    with pytest.raises(RuntimeError, match="cannot get heuristic kernel"):
        case.call()


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_two_query_tokens_see_what_they_may(aiter, heads, fp8):
    case = Decode(aiter, [40, 17], heads, q_fp8=fp8, kv_fp8=fp8, qlen=2)
    assert close(case.call(**case.plan()), case.wanted())
    case.o = torch.full_like(case.o, float("nan"))
    assert close(case.call(), case.wanted())


def test_many_splits_over_few_compute_units(aiter, monkeypatch):
    monkeypatch.setenv("CU_NUM", "5")
    case = Decode(aiter, [700, 3, 65], 16)
    plan = case.plan()
    assert plan["reduce_indptr"][-1] > 0
    assert close(case.call(**plan), case.wanted())
    monkeypatch.setenv("AITER_MLA_META_USE_PARALLEL", "0")
    case.o.fill_(float("nan"))
    assert close(case.call(**case.plan()), case.wanted())


@pytest.mark.parametrize("heads", [16, 128])
def test_sglangs_plan(heads):
    with on("gfx942") as aiter:
        case = Decode(aiter, [70, 40], heads, q_fp8=True, kv_fp8=True)
        plan = case.plan(mode={"fast_mode": False, "intra_batch_mode": True})
        assert close(case.call(**plan, num_kv_splits=32, intra_batch_mode=True), case.wanted())


@pytest.mark.parametrize("wrong", [
    {"sm_scale": SCALE / 2}, {"sm_scale": None}, {"kv_scale": torch.tensor([1.0])},
    {"q_scale": torch.tensor([1.0])},
])  # fmt: skip
def test_a_wrong_scale_gives_another_answer(aiter, wrong):
    case = Decode(aiter, [70, 3], 16, q_fp8=True, kv_fp8=True)
    assert not close(case.call(**wrong), case.wanted())


def differs(case, **wrong):
    try:
        return not close(case.call(**wrong), case.wanted())
    except Exception as error:
        return str(error)


def test_wrong_arrays_are_refused_or_seen(aiter):
    case = Decode(aiter, [20, 9], 16, page=16)
    for name, array in case.arrays.items():
        assert differs(case, **{name: array.long()}), name
        assert differs(case, **{name: array.flip(0)}) or name == "qo_indptr", name
        assert differs(case, **{name: array + 1}), name
    assert differs(case, kv_last_page_lens=case.arrays["kv_last_page_lens"] - 1)
    assert differs(case, page_size=1)
    assert differs(case, page_size=48)
    assert differs(case, kv=case.kv.flatten(0, 1)[:, None])
    assert differs(case, max_seqlen_q=2)


def test_wrong_tensors_are_refused(aiter):
    case = Decode(aiter, [20, 9], 16)
    wide = torch.randn(2, 16, D + 8, dtype=torch.bfloat16)[..., :D]
    other = torch.float8_e4m3fn if aiter.dtypes.fp8 == torch.float8_e4m3fnuz else torch.float8_e4m3fnuz
    for wrong in (
        {"q": wide}, {"q": case.q.half()}, {"q": case.q.to(aiter.dtypes.fp8), "q_scale": None},
        {"kv": case.kv.to(other)}, {"kv": case.kv[..., :V]}, {"logit_cap": 30.0}, {"nhead_kv": 2},
        {"sm_scale": "1"}, {"causal": "yes"}, {"q": case.q.to(aiter.dtypes.fp8)}, {"max_seqlen_q": 1.5},
        {"kv": case.kv.to(aiter.dtypes.fp8), "kv_scale": torch.tensor([1.0]).double()},
    ):  # fmt: skip
        with pytest.raises((RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError)):
            case.call(**wrong)


def test_head_counts_without_a_kernel_are_refused(aiter):
    for heads, persistent in ((48, False), (4, False), (136, True)):
        case = Decode(aiter, [20], heads)
        with pytest.raises((RuntimeError, AssertionError, TypeError)):
            case.call(**(case.plan() if persistent else {}))


def test_metadata_is_bound_to_its_buffers_and_lengths(aiter):
    case = Decode(aiter, [40, 9], 16)
    plan = case.plan()
    with pytest.raises(ValueError, match="points at other buffers"):
        case.call(**(plan | {"work_info_set": plan["work_info_set"].clone()}))
    longer = Decode(aiter, [40, 30], 16)
    assert differs(longer, **plan)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        case.call(work_meta_data=plan["work_meta_data"])
    with pytest.raises(RuntimeError, match="Expected a value of type"):
        case.plan(max_seqlen_qo=1.5)
    with pytest.raises(RuntimeError, match="element type should be int"):
        case.arrays["kv_indptr"] = case.arrays["kv_indptr"].long()
        case.plan()


def test_metadata_planned_for_other_dtypes_is_seen():
    with on("gfx942") as aiter:
        case = Decode(aiter, [40, 9], 128, q_fp8=True, kv_fp8=True)
        with pytest.raises(ValueError):
            case.call(**case.plan(dtype_q=None, dtype_kv=None))


def test_lse_of_a_persistent_call_needs_a_kernel():
    with on("gfx942") as aiter:
        case = Decode(aiter, [40], 16)
        with pytest.raises(RuntimeError, match="lse:1"):
            case.call(**case.plan(), return_lse=True)
        case.call(return_lse=True)
        assert torch.isfinite(case.returned[1]).all()


@pytest.mark.parametrize("kv_fp8", [False, True])
@pytest.mark.parametrize("page", [16, 64])
def test_triton_decode(aiter, page, kv_fp8):
    mla = importlib.import_module("aiter.ops.triton.attention.mla")
    plain = importlib.import_module("aiter.ops.triton.attention.mla_decode")
    case = Decode(aiter, [70, 5], 16, page, kv_fp8=kv_fp8)
    indptr, pages = case.arrays["kv_indptr"].tolist(), case.arrays["kv_indices"]
    table = torch.zeros(2, 8, dtype=torch.int32)
    for b in range(2):
        table[b, : indptr[b + 1] - indptr[b]] = pages[indptr[b] : indptr[b + 1]]
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    scale = torch.tensor([2.0]) if kv_fp8 else None
    arguments = (case.arrays["qo_indptr"], lengths, 70, table, SCALE, 512, 64, True, None, scale)
    assert close(mla.mla_decode_fwd(case.q, case.kv, case.o, *arguments), case.wanted())
    with pytest.raises(ValueError, match=r"tl\.dot"):
        mla.mla_decode_fwd(case.q, case.kv.view(-1, 1, 1, D), case.o, *arguments)
    logits, lse, o = torch.empty(2, 16, 4, V + 1), torch.empty(2, 16), torch.empty_like(case.o)
    plain.decode_attention_fwd(case.q, case.kv, case.kv[..., :V], o, lse, table, lengths, logits,
        4, SCALE, page,
                               0.0,
                               scale, scale)  # fmt: skip
    assert close(o, case.wanted())
    plain.decode_attention_fwd(
        case.q, case.kv, case.kv[..., :V], o, lse, table, lengths - 1, logits, 4, SCALE, page
    )
    assert not close(o, case.wanted())


def test_compiled_functions_are_operators_without_a_signature(aiter):
    for name in ("mla_reduce_v1", "mla_decode_stage1_asm_fwd", "get_ps_metadata_v1"):
        kinds = [p.kind for p in inspect.signature(getattr(aiter, name)).parameters.values()]
        assert kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD], name
    arguments = torch.ops.aiter.mla_reduce_v1.default._schema.arguments
    assert [a.name for a in arguments][5:8] == ["max_seqlen_q", "num_kv_splits", "final_output"]
    decode = inspect.signature(aiter.mla.mla_decode_fwd).parameters
    assert list(decode)[8:11] == ["page_size", "nhead_kv", "sm_scale"] and decode["causal"].default is True
    assert list(inspect.signature(aiter.get_mla_metadata_v1).parameters)[2] == "kv_last_page_lens"
