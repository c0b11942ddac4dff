"""The double of AITER's attention: right against plain torch, and every wrong use is refused or seen."""

from __future__ import annotations

import importlib
import inspect
from contextlib import contextmanager

import pytest
import torch
from doubles import lent

D, V, SCALE = 576, 512, 0.1352337788608801


@pytest.fixture(params=["gfx942", "gfx950"])
def aiter(request):
    with lent("rocm", request.param, "aiter_attention"):
        yield importlib.import_module("aiter")


@contextmanager
def on(arch: str):
    with lent("rocm", arch, "aiter_attention"):
        yield importlib.import_module("aiter")


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    found, wanted = found.float(), wanted.float()
    return (
        bool(torch.isfinite(found).all())
        and (found - wanted).abs().max().item() < 0.02 * wanted.abs().max().item()
    )


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
        {"causal": 0.5},
        {"sm_scale": "1"}, {"q": case.q.to(aiter.dtypes.fp8)}, {"max_seqlen_q": torch.tensor(1)},
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
    with pytest.raises(TypeError):
        case.plan(max_seqlen_qo=torch.tensor(1))
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


class Prefill:
    def __init__(self, dtype, new, past, heads=4, dim=192, v_dim=128, seed=0):
        torch.manual_seed(seed)
        keys = [n + p for n, p in zip(new, past, strict=True)]
        self.new, self.keys, self.heads = new, keys, heads
        self.q, self.k, self.v = (
            torch.randn(sum(n), heads, d).to(dtype) for n, d in ((new, dim), (keys, dim), (keys, v_dim))
        )
        self.cu_q, self.cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (new, keys))
        self.arguments = {
            "cu_seqlens_q": self.cu_q, "cu_seqlens_k": self.cu_k, "max_seqlen_q": max(new),
            "max_seqlen_k": max(keys),
            "softmax_scale": SCALE, "causal": True,
        }  # fmt: skip

    def wanted(self, times=(1.0, 1.0, 1.0), causal=True):
        outs, q0, k0 = [], 0, 0
        for n, m in zip(self.new, self.keys, strict=True):
            q, k, v = self.q[q0 : q0 + n].float(), self.k[k0 : k0 + m].float(), self.v[k0 : k0 + m].float()
            scores = torch.einsum("qhd,khd->hqk", q, k) * (SCALE * times[0] * times[1])
            if causal:
                scores = scores.masked_fill(torch.ones(n, m).triu(m - n + 1).bool(), float("-inf"))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v) * times[2])
            q0, k0 = q0 + n, k0 + m
        return torch.cat(outs)


PREFILLS = [([40, 7], [0, 0]), ([5, 12, 1], [9, 0, 30])]


@pytest.mark.parametrize(("new", "past"), PREFILLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_prefill(aiter, dtype, new, past):
    case = Prefill(dtype, new, past)
    given = torch.empty_like(case.q[..., :128])
    for causal in (True, False):
        arguments = case.arguments | {"causal": causal}
        found = aiter.flash_attn_varlen_func(case.q, case.k, case.v, **arguments)
        assert close(found, case.wanted(causal=causal))
        assert (
            aiter.flash_attn_varlen_func(case.q, case.k, case.v, **arguments, out=given).data_ptr()
            == given.data_ptr()
        )
        assert torch.equal(given, found)
    found, lse = aiter.flash_attn_varlen_func(case.q, case.k, case.v, **case.arguments, return_lse=True)
    assert close(found, case.wanted()) and lse.shape == (case.heads, sum(new))
    triton = importlib.import_module("aiter.ops.triton.mha")
    found, other = triton.flash_attn_varlen_func(case.q, case.k, case.v, **case.arguments, return_lse=True)
    assert close(found, case.wanted()) and torch.allclose(lse.T, other, atol=1e-4)


@pytest.mark.parametrize("dims", [(192, 128), (128, 128)])
def test_fp8_prefill_per_tensor(aiter, dims):
    case = Prefill(aiter.dtypes.fp8, [5, 12], [9, 0], dim=dims[0])
    descales = [torch.tensor([x]) for x in (0.5, 0.75, 2.0)]
    found = aiter.flash_attn_varlen_fp8_pertensor_func(case.q, case.k, case.v, *descales, **case.arguments)
    assert found.dtype == torch.bfloat16 and close(found, case.wanted((0.5, 0.75, 2.0)))
    swapped = aiter.flash_attn_varlen_fp8_pertensor_func(
        case.q, case.k, case.v, *descales[::-1], **case.arguments
    )
    assert not close(swapped, case.wanted((0.5, 0.75, 2.0)))
    with pytest.raises((RuntimeError, ValueError)):
        aiter.flash_attn_varlen_fp8_pertensor_func(
            case.q, case.k, case.v, *(d.double() for d in descales), **case.arguments
        )


@pytest.mark.parametrize("wrong", [
    {"cu_seqlens_q": torch.tensor([0, 5, 18], dtype=torch.int32)}, {"max_seqlen_q": 4}, {"max_seqlen_k": 8},
    {"cu_seqlens_k": torch.tensor([0, 14], dtype=torch.int32)}, {"out": torch.empty(17, 4, 128)},
    {"cu_seqlens_k": torch.tensor([0, 13, 26], dtype=torch.int32)}, {"softmax_scale": None},
])  # fmt: skip
def test_a_wrong_prefill_is_refused_or_seen(aiter, wrong):
    case = Prefill(torch.bfloat16, [5, 12], [9, 0])
    try:
        found = aiter.flash_attn_varlen_func(case.q, case.k, case.v, **(case.arguments | wrong))
    except (RuntimeError, ValueError):
        return
    assert not close(found, case.wanted())


def entry(aiter, name, case, **changed):
    """One of the compiled entries, by the arguments that it takes."""
    arguments = dict(case.arguments) | {"softmax_scale": SCALE}
    causal = arguments.pop("causal")
    if name == "fmha_fwd_bf16_opus_varlen_fwd":
        arguments = {k.replace("cu_seqlens", "seqstart"): v for k, v in arguments.items()}
        return aiter.fmha_fwd_bf16_opus_varlen_fwd(
            **({"q": case.q, "k": case.k, "v": case.v, "causal": causal} | arguments | changed)
        )
    arguments |= {
        "q": case.q, "k": case.k, "v": case.v, "is_causal": causal, "min_seqlen_q": 0, "dropout_p": 0.0,
        "logits_soft_cap": 0.0, "zero_tensors": False, "window_size_left": -1, "window_size_right": -1,
        "return_softmax_lse": False, "return_dropout_randval": False,
    }  # fmt: skip
    arguments |= {"how_v3_bf16_cvt": 1} if name == "fmha_v3_varlen_fwd" else {"sink_size": 0}
    return getattr(aiter, name)(**(arguments | changed))


@pytest.mark.parametrize(("new", "past"), PREFILLS)
@pytest.mark.parametrize("name", ["fmha_v3_varlen_fwd", "mha_varlen_fwd"])
def test_prefill_by_one_backend(aiter, name, new, past):
    case = Prefill(torch.bfloat16, new, past)
    out, lse, *rest = entry(aiter, name, case)
    assert close(out, case.wanted()) and lse.numel() == 0 and len(rest) == 2
    given = torch.empty_like(out)
    out, lse, *_ = entry(aiter, name, case, out=given, return_softmax_lse=True, is_causal=False)
    assert out.data_ptr() == given.data_ptr() and close(given, case.wanted(causal=False))
    assert lse.shape == (case.heads, sum(new)) and torch.isfinite(lse).all()
    for wrong in (
        {"softmax_scale": None}, {"causal": True}, {"max_seqlen_q": 3}, {"max_seqlen_k": 3},
        {"q": case.q.half()}, {"k": case.k.transpose(1, 2).contiguous().transpose(1, 2)},
        {"out": given.float()}, {"cu_seqlens_q": case.cu_q.long()}, {"dropout_p": 0.5},
        {"cu_seqlens_k": case.cu_k + 1}, {"v": case.k}, {"return_dropout_randval": True},
    ):  # fmt: skip
        with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError)):
            entry(aiter, name, case, **wrong)


@pytest.mark.parametrize("name", ["fmha_v3_varlen_fwd", "mha_varlen_fwd"])
def test_an_entry_is_an_operator_whose_schema_tells_its_arguments(aiter, name):
    kinds = [p.kind for p in inspect.signature(getattr(aiter, name)).parameters.values()]
    assert kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    arguments = getattr(torch.ops.aiter, name).default._schema.arguments
    assert [a.name for a in arguments[:5]] == ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"]
    assert [a.name for a in arguments if not a.has_default_value()][-1] in (
        "how_v3_bf16_cvt", "return_dropout_randval"
    )  # fmt: skip


def test_the_assembly_has_kernels_of_its_own(aiter):
    name, fp8 = "fmha_v3_varlen_fwd", aiter.dtypes.fp8
    descales = {f"{x}_descale": torch.tensor([t]) for x, t in zip("qkv", (0.5, 0.75, 2.0), strict=True)}
    case = Prefill(fp8, [5, 12], [9, 0], dim=128)
    assert close(entry(aiter, name, case, **descales)[0], case.wanted((0.5, 0.75, 2.0)))
    per_head = {n: d.expand(2, case.heads).contiguous() for n, d in descales.items()}
    assert close(entry(aiter, name, case, **per_head)[0], case.wanted((0.5, 0.75, 2.0)))
    wide, half = Prefill(fp8, [5], [0]), Prefill(torch.float16, [5], [0])
    for wrong, other in (
        (wide, descales), (half, {}), (case, {}), (case, {n: d.double() for n, d in descales.items()}),
        (Prefill(torch.bfloat16, [5], [0]), descales),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, ValueError)):
            entry(aiter, name, wrong, **other)
    with pytest.raises((RuntimeError, ValueError)):
        entry(aiter, name, case, **(descales | {"v_descale": None}))
    assert close(entry(aiter, "mha_varlen_fwd", wide, **descales)[0], wide.wanted((0.5, 0.75, 2.0)))
    assert close(entry(aiter, "mha_varlen_fwd", half)[0], half.wanted())
    with pytest.raises(RuntimeError, match="invalid argument"):
        entry(aiter, "mha_varlen_fwd", wide, **descales, return_softmax_lse=True)


def test_ck_skips_short_sequences_where_it_is_told_a_shortest_one(aiter):
    case = Prefill(torch.bfloat16, [5, 12], [9, 0])
    out = entry(aiter, "mha_varlen_fwd", case, min_seqlen_q=5)[0]
    assert out[:5].isnan().all() and close(out[5:], case.wanted()[5:])
    assert close(entry(aiter, "fmha_v3_varlen_fwd", case, min_seqlen_q=5)[0], case.wanted())


def test_opus_is_of_gfx950_and_of_one_shape():
    name = "fmha_fwd_bf16_opus_varlen_fwd"
    case = Prefill(torch.bfloat16, [5, 12], [9, 0])
    with on("gfx950") as aiter:
        given = torch.empty(17, 4, 128, dtype=torch.bfloat16)
        assert entry(aiter, name, case, out=given) is given and close(given, case.wanted())
        assert close(entry(aiter, name, case, causal=False), case.wanted(causal=False))
        for wrong in (
            {"q": case.q.half()}, {"v": case.k}, {"max_seqlen_k": 0}, {"max_seqlen_q": 3},
            {"seqstart_k": case.cu_k[:-1]}, {"out": given[1:]}, {"k": case.k[:, :3]},
        ):  # fmt: skip
            with pytest.raises((RuntimeError, ValueError)):
                entry(aiter, name, case, **wrong)
    with on("gfx942") as aiter, pytest.raises(RuntimeError, match="gfx950"):
        entry(aiter, name, case)


def plan_ps(aiter, case, **changed):
    batch, heads = len(case.new), case.heads
    info = aiter.get_ps_metadata_info_v1(batch, heads, max(case.new))
    meta, work_indptr, work_info, *maps = (torch.zeros(shape, dtype=kind) for shape, kind in info)
    options = {
        "qhead_granularity": 1,
        "qlen_granularity": 256,
        "kvlen_granularity": 128,
        "block_size": 1,
        "is_causal": True,
    }
    aiter.get_ps_metadata_v1(
        case.cu_q, case.cu_k, torch.tensor(case.keys, dtype=torch.int32), 1, heads, meta, work_indptr,
        work_info,
        *maps, **(options | changed),
    )  # fmt: skip
    return work_indptr, work_info, maps


@pytest.mark.parametrize("unit", [16, 128])
def test_persistent_fp8_prefill(unit):
    with on("gfx950") as aiter:
        case = Prefill(aiter.dtypes.fp8, [40, 7], [30, 0], heads=16)
        work_indptr, work_info, maps = plan_ps(aiter, case, kvlen_granularity=unit)
        out = torch.full((47, 16, 128), float("nan"), dtype=torch.bfloat16)
        one = torch.ones(1)
        pages = torch.arange(sum(case.keys), dtype=torch.int32)
        arguments = [
            case.q,
            case.k,
            case.v,
            out,
            case.cu_q,
            case.cu_k,
            pages,
            work_indptr,
            work_info,
            40,
            True,
            *maps,
        ]
        aiter.mla.mla_prefill_ps_fwd(*arguments, SCALE, one, one, one)
        assert close(out, case.wanted())
        aiter.mla.mla_prefill_ps_fwd(*arguments, None, one, one, one)
        assert not close(out, case.wanted())
        with pytest.raises(ValueError, match="packed"):
            aiter.mla.mla_prefill_ps_fwd(
                case.q.transpose(0, 1).contiguous().transpose(0, 1), *arguments[1:], SCALE
            )


def test_persistent_fp8_prefill_is_not_on_gfx942():
    with on("gfx942") as aiter:
        case = Prefill(aiter.dtypes.fp8, [4], [0], heads=8)
        work_indptr, work_info, maps = plan_ps(aiter, case)
        out = torch.empty(4, 8, 128, dtype=torch.bfloat16)
        pages = torch.arange(4, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="not supported on gfx942"):
            aiter.mla.mla_prefill_ps_fwd(
                case.q,
                case.k,
                case.v,
                out,
                case.cu_q,
                case.cu_k,
                pages,
                work_indptr,
                work_info,
                4,
                True,
                *maps,
                SCALE,
            )


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


def test_signatures_show_through(aiter):
    names = list(inspect.signature(aiter.mla_reduce_v1).parameters)
    assert names[5:8] == ["max_seqlen_q", "num_kv_splits", "final_output"]
    decode = inspect.signature(aiter.mla.mla_decode_fwd).parameters
    assert list(decode)[8:11] == ["page_size", "nhead_kv", "sm_scale"] and decode["causal"].default is True
    assert inspect.signature(aiter.get_ps_metadata_v1).parameters["block_size"].default == 16
