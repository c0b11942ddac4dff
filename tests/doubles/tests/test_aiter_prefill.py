"""The double of AITER's prefill: right against plain torch, and every wrong use is refused or seen."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from tests.support.aiter_attention import SCALE, close, on


@pytest.fixture(params=["gfx942", "gfx950"])
def aiter(request):
    with on(request.param) as aiter:
        yield aiter


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
        work_indptr[0] = work_indptr[1]  # nobody does the first group's works
        aiter.mla.mla_prefill_ps_fwd(*arguments, SCALE, one, one, one)
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
