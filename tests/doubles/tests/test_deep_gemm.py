"""The double of DeepGEMM against plain torch, and what it must not take."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

from kernels import platform
from tests.doubles import lent
from tests.support.block_scaled import is_product

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["sm_90", "sm_100", "sm_103"])
def deep_gemm(request) -> ModuleType:
    with lent("cuda", request.param, "deep_gemm"):
        yield _imported(request.param)


@pytest.fixture
def sm_90() -> ModuleType:
    with lent("cuda", "sm_90", "deep_gemm"):
        yield _imported("sm_90")


@pytest.fixture
def sm_100() -> ModuleType:
    with lent("cuda", "sm_100", "deep_gemm"):
        yield _imported("sm_100")


def _imported(arch: str) -> ModuleType:
    import deep_gemm

    deep_gemm.arch = arch
    return deep_gemm


def quantised(*shape: int, block: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 values, scales that are powers of two (both architectures take them), and their product."""
    *groups, rows, k = shape
    values = torch.randn(shape).to(FP8)
    scale = 2.0 ** torch.randint(-4, 4, (*groups, -(-rows // block), -(-k // 128))).float()
    full = scale.repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :k]
    return values, scale, values.float() * full


def test_what_is_installed(deep_gemm):
    assert platform.version("deep_gemm") == "0.2.5" == deep_gemm.__version__
    assert platform.lookalike("deep_gemm") == ""
    names = list(inspect.signature(deep_gemm.fp8_gemm_nt).parameters)
    assert names[:5] == ["a", "b", "d", "c", "recipe"] and names[-2:] == ["alpha", "epilogue"]
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == 128
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128
    assert deep_gemm.get_tma_aligned_size(33, 4) == 36
    sms = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(sms - 2)
    assert deep_gemm.get_num_sms() == sms - 2
    with pytest.raises(RuntimeError, match="num_sms"):
        deep_gemm.set_num_sms(sms + 1)


@pytest.mark.parametrize("m", [1, 7, 33])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (192, 512), (256, 640)])
def test_dense(deep_gemm, m, n, k):
    a, sfa, left = quantised(m, k)
    b, sfb, right = quantised(n, k, block=128)
    d = torch.empty(m, n, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)
    assert is_product(d, left, right)
    prepared = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
    assert prepared.stride() == (1, deep_gemm.get_tma_aligned_size(m, 4))
    assert deep_gemm.get_mn_major_tma_aligned_tensor(prepared) is prepared
    again = torch.empty_like(d)
    deep_gemm.fp8_gemm_nt((a, prepared), (b, sfb), again)
    assert torch.equal(again, d)


def test_packed_exponents(sm_100):
    a, sfa, left = quantised(33, 640)
    b, sfb, right = quantised(256, 640, block=128)
    d = torch.empty(33, 256, dtype=torch.bfloat16)
    packed = sm_100.get_mn_major_tma_aligned_packed_ue8m0_tensor(sfa)
    assert packed.dtype == torch.int32 and packed.shape == (33, 2) and packed.stride() == (1, 36)
    weights = sm_100.transform_sf_into_required_layout(sfb, 256, 640, (1, 128, 128), is_sfa=False)
    assert weights.shape == (256, 2) and weights.dtype == torch.int32
    sm_100.fp8_gemm_nt((a, packed), (b, weights), d, recipe=(1, 1, 128))
    assert is_product(d, left, right)
    sm_100.fp8_gemm_nt((a, packed), (b, weights), d)  # the default recipe of int32 scales
    assert is_product(d, left, right)
    with pytest.raises(RuntimeError, match="device assertion"):
        sm_100.get_mn_major_tma_aligned_packed_ue8m0_tensor(sfa * 1.5)
    with pytest.raises(RuntimeError, match="Unsupported architecture"):
        sm_100.fp8_gemm_nt((a, sfa), (b, sfb), d, disable_ue8m0_cast=True)
    with pytest.raises(RuntimeError, match="sf"):
        sm_100.fp8_gemm_nt((a, packed.contiguous()), (b, weights), d)


def test_the_fallback_drops_the_mantissa_without_a_word(sm_100):
    odd = torch.full((3, 5, 1), 1.5)  # 5 * 1 is no multiple of 4, and there are groups
    packed = sm_100.get_mn_major_tma_aligned_packed_ue8m0_tensor(odd)
    assert bool((packed == 127).all())


WRONG_DENSE = {
    "a transposed scale": lambda c: c | {"a": (c["a"][0], c["a"][1].T)},
    "a scale per tensor": lambda c: c | {"a": c["a"][0]},
    "scales of bfloat16": lambda c: c | {"a": (c["a"][0], c["a"][1].bfloat16())},
    "1x128 scales for b": lambda c: c | {"b": (c["b"][0], c["b"][1].repeat_interleave(128, 0))},
    "bfloat16 values": lambda c: c | {"a": (c["a"][0].bfloat16(), c["a"][1])},
    "e5m2": lambda c: c | {"a": (c["a"][0].to(torch.float8_e5m2), c["a"][1])},
    "b as [k, n]": lambda c: c | {"b": (c["b"][0].T.contiguous(), c["b"][1])},
    "an output transposed": lambda c: c | {"d": torch.empty(256, 8, dtype=torch.bfloat16).T},
    "an output of float16": lambda c: c | {"d": c["d"].half()},
    "an output of another shape": lambda c: c | {"d": c["d"][:4]},
    "a recipe of three for recipe_a": lambda c: c | {"recipe_a": (1, 128, 128)},
    "a misaligned start": lambda c: c | {"a": (torch.zeros(8 * 512 + 8).to(FP8)[8:].view(8, 512), c["a"][1])},
}


@pytest.mark.parametrize("wrong", WRONG_DENSE)
def test_refused_dense(deep_gemm, wrong):
    a, sfa, _ = quantised(8, 512)
    b, sfb, _ = quantised(256, 512, block=128)
    call = {"a": (a, sfa), "b": (b, sfb), "d": torch.empty(8, 256, dtype=torch.bfloat16)}
    with pytest.raises((RuntimeError, NotImplementedError)):
        deep_gemm.fp8_gemm_nt(**WRONG_DENSE[wrong](call))


def test_sm_90_has_one_kernel(sm_90):
    a, sfa, _ = quantised(8, 512)
    b, sfb, _ = quantised(256, 512, block=128)
    with pytest.raises(RuntimeError, match="kBFloat16"):
        sm_90.fp8_gemm_nt((a, sfa), (b, sfb), torch.empty(8, 256))
    with pytest.raises(RuntimeError, match="kFloat"):
        packed = sm_90.get_mn_major_tma_aligned_packed_ue8m0_tensor(sfa)
        sm_90.fp8_gemm_nt((a, packed), (b, sfb), torch.empty(8, 256, dtype=torch.bfloat16))
    c, sfc, _ = quantised(100, 512, block=128)
    with pytest.raises(RuntimeError, match="% 16u"):
        sm_90.fp8_gemm_nt((a, sfa), (c, sfc), torch.empty(8, 100, dtype=torch.bfloat16))


def test_weight_scales_of_the_wrong_order_give_a_wrong_answer(sm_90):
    a, sfa, left = quantised(8, 512)
    b, sfb, right = quantised(512, 512, block=128)
    d = torch.empty(8, 512, dtype=torch.bfloat16)
    sm_90.fp8_gemm_nt((a, sfa), (b, sfb.T), d)
    assert not torch.allclose(d.float(), left @ right.T, rtol=0.1, atol=1)
    sm_90.fp8_gemm_nt((a, sfa), (b, sfb.T.contiguous().T), d)  # K-major or MN-major, by the strides
    assert is_product(d, left, right)


def test_contiguous(deep_gemm):
    rows, n, k = 384, 128, 256
    a, sfa, left = quantised(rows, k)
    b, sfb, right = quantised(8, n, k, block=128)
    layout = torch.full((rows,), -1, dtype=torch.int32)
    layout[:5], layout[128:300] = 3, 0
    layout[256:300] = 6
    d = torch.full((rows, n), 9.0, dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, sfa), (b, sfb), d, layout)
    for rows_of, expert in ((slice(0, 5), 3), (slice(128, 256), 0), (slice(256, 300), 6)):
        assert is_product(d[rows_of], left[rows_of], right[expert])
    if deep_gemm.arch == "sm_90":  # the second warpgroup of the tile has nothing but padding
        assert bool((d[64:128] == 0).all())

    straddling = layout.clone()
    straddling[:128] = torch.arange(8, dtype=torch.int32).repeat_interleave(16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, sfa), (b, sfb), d, straddling)
    assert is_product(d[:128], left[:128], right[0])  # the tile's first row decides


WRONG_CONTIGUOUS = {
    "an expert that is not there": lambda c: c | {"grouped_layout": c["grouped_layout"] + 8},
    "int64": lambda c: c | {"grouped_layout": c["grouped_layout"].long()},
    "one entry per expert": lambda c: c | {"grouped_layout": c["grouped_layout"][:8]},
    "a strided layout": lambda c: c | {"grouped_layout": c["grouped_layout"].repeat_interleave(2)[::2]},
    "an output of float32": lambda c: c | {"d": c["d"].float()},
    "weights of one expert": lambda c: c | {"b": (c["b"][0][0], c["b"][1][0])},
    "weights cut from more": lambda c: c | {"b": (c["b"][0].repeat(1, 2, 1)[:, :128], c["b"][1])},
}


@pytest.mark.parametrize("wrong", WRONG_CONTIGUOUS)
def test_refused_contiguous(deep_gemm, wrong):
    a, sfa, _ = quantised(128, 256)
    b, sfb, _ = quantised(8, 128, 256, block=128)
    d = torch.empty(128, 128, dtype=torch.bfloat16)
    call = {"a": (a, sfa), "b": (b, sfb), "d": d, "grouped_layout": torch.zeros(128, dtype=torch.int32)}
    with pytest.raises(RuntimeError):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(**WRONG_CONTIGUOUS[wrong](call))


def test_masked(deep_gemm):
    m, n, k = 256, 128, 256
    a, sfa, left = quantised(8, m, k)
    b, sfb, right = quantised(8, n, k, block=128)
    masked = torch.tensor([0, 1, 17, 5, 128, 256, 0, 2], dtype=torch.int32)
    d = torch.full((8, m, n), 9.0, dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((a, sfa), (b, sfb), d, masked, 33)
    for group, rows in enumerate(masked.tolist()):
        assert is_product(d[group, :rows], left[group, :rows], right[group])
        assert bool((d[group, -(-rows // 128) * 128 :] == 9).all())  # tiles beyond masked_m are left


WRONG_MASKED = {
    "rows a tile would spill over": lambda c: {n: _cut(v) for n, v in c.items()} | {"d": _cut(c["d"])},
    "int64": lambda c: c | {"masked_m": c["masked_m"].long()},
    "more rows than there are": lambda c: c | {"masked_m": c["masked_m"] + 256},
    "no expected_m": lambda c: c | {"expected_m": 0},
    "an expected_m of a tensor": lambda c: c | {"expected_m": torch.tensor(4)},
    "scales of rows": lambda c: c | {"a": (c["a"][0], c["a"][1].mT)},
}


def _cut(value):
    if isinstance(value, tuple):
        return tuple(t[:, :96].contiguous() if t.shape[1] == 256 else t for t in value)
    return value[:, :96].contiguous() if isinstance(value, torch.Tensor) and value.dim() == 3 else value


@pytest.mark.parametrize("wrong", WRONG_MASKED)
def test_refused_masked(deep_gemm, wrong):
    a, sfa, _ = quantised(8, 256, 256)
    b, sfb, _ = quantised(8, 128, 256, block=128)
    call = {
        "a": (a, sfa),
        "b": (b, sfb),
        "d": torch.empty(8, 256, 128, dtype=torch.bfloat16),
        "expected_m": 4,
    }
    call["masked_m"] = torch.full((8,), 4, dtype=torch.int32)
    with pytest.raises((RuntimeError, TypeError)):
        deep_gemm.m_grouped_fp8_gemm_nt_masked(**WRONG_MASKED[wrong](call))
