"""The double of FlashInfer's FP8 block-scale GEMMs against plain torch, and what it must not take."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

from kernels import platform
from tests.doubles import lent
from tests.support.block_scaled import activations, alike, is_product, weights


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def hopper() -> ModuleType:
    with lent("cuda", "sm_90", "flashinfer_gemm_moe"):
        import flashinfer

        yield flashinfer


@pytest.fixture
def blackwell() -> ModuleType:
    with lent("cuda", "sm_100", "flashinfer_gemm_moe"):
        import flashinfer

        yield flashinfer


def m_major(scale: torch.Tensor) -> torch.Tensor:
    """[K / 128, M] with rows of M rounded up to 4."""
    m = scale.shape[0]
    padded = torch.full((scale.shape[1], -(-m // 4) * 4), float("nan"))
    padded[:, :m] = scale.T
    return padded[:, :m]


def test_what_is_installed(hopper):
    assert platform.version("flashinfer") == hopper.__version__ == "0.6.18"
    with hopper.autotune(), hopper.autotune(True, cache=None):
        pass
    names = list(inspect.signature(hopper.gemm.gemm_fp8_nt_groupwise).parameters)
    assert names[4:7] == ["scale_major_mode", "mma_sm", "scale_granularity_mnk"]
    with pytest.raises(ValueError), hopper.autotune(tuning_buckets=()):
        pass


@pytest.mark.parametrize("m", [1, 6, 33])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (192, 512)])
def test_sm90_gemm(hopper, m, n, k):
    a, sa, left = activations(m, k)
    b, sb, right = weights(n, k)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    got = hopper.gemm.fp8_blockscale_gemm_sm90(a, b, m_major(sa), sb, out=out)
    assert got is out
    assert is_product(out, left, right)
    x = torch.randn(m, k).bfloat16()
    mixed = hopper.gemm.fp8_blockscale_gemm_sm90(x, b, None, sb)
    assert alike(mixed, x.float() @ right.T)


def test_sm90_gemm_reads_pointers(hopper):
    a, sa, left = activations(8, 512)
    b, sb, right = weights(256, 512)
    wanted = left @ right.T
    wrong = hopper.gemm.fp8_blockscale_gemm_sm90(a, b, sa, sb)  # (M, K / 128), as its docstring says
    assert not torch.allclose(wrong.float(), wanted, rtol=0.05, atol=0.5)
    rows = sb.repeat_interleave(128, 0)  # (N, K / 128), accepted, read as (N / 128, K / 128)
    wrong = hopper.gemm.fp8_blockscale_gemm_sm90(a, b, m_major(sa), rows)
    assert not torch.allclose(wrong.float(), wanted, rtol=0.05, atol=0.5)
    half = hopper.gemm.fp8_blockscale_gemm_sm90(a, b, m_major(sa), sb, out_dtype=torch.float16)
    assert is_product(half.view(torch.bfloat16), left, right)  # bfloat16's bits in a float16
    cut, scale, _ = activations(6, 512)
    with pytest.raises(RuntimeError, match="illegal memory"):
        hopper.gemm.fp8_blockscale_gemm_sm90(cut, b, scale, sb)


WRONG_SM90 = {
    "no input scale": lambda c: c | {"input_scale": None},
    "no weight scale": lambda c: c | {"weight_scale": None},
    "a bfloat16 scale": lambda c: c | {"input_scale": c["input_scale"].bfloat16()},
    "a transposed weight scale": lambda c: c | {"weight_scale": c["weight_scale"].T},
    "a scale of a bfloat16 input": lambda c: c | {"input": c["input"].bfloat16()},
    "a bfloat16 weight": lambda c: c | {"weight": c["weight"].bfloat16(), "weight_scale": None},
    "e5m2": lambda c: c | {"input": c["input"].to(torch.float8_e5m2)},
    "a weight of [K, N]": lambda c: c | {"weight": c["weight"].T},
    "an input cut from a wider one": lambda c: c | {"input": c["input"].repeat(1, 2)[:, :512]},
    "N of 160": lambda c: c | {"weight": c["weight"][:160]},
    "float32 output": lambda c: c | {"out_dtype": torch.float32},
    "an output of another shape": lambda c: c | {"out": torch.empty(256, 8, dtype=torch.bfloat16)},
    "an output that is transposed": lambda c: c | {"out": torch.empty(256, 8, dtype=torch.bfloat16).T},
}


@pytest.mark.parametrize("wrong", WRONG_SM90)
def test_refused_sm90_gemm(hopper, wrong):
    a, sa, _ = activations(8, 512)
    b, sb, _ = weights(256, 512)
    call = {"input": a, "weight": b, "input_scale": m_major(sa), "weight_scale": sb}
    with pytest.raises((ValueError, RuntimeError)):
        hopper.gemm.fp8_blockscale_gemm_sm90(**WRONG_SM90[wrong](call))


def test_each_gemm_has_its_architecture(hopper, monkeypatch):
    a, sa, _ = activations(8, 512)
    b, sb, _ = weights(256, 512)
    with pytest.raises(hopper.gemm.gemm_base.BackendSupportedError):
        hopper.gemm.gemm_fp8_nt_groupwise(a, b, sa, sb, "K")
    monkeypatch.setenv("DOUBLE_ARCH", "sm_100")
    with pytest.raises(ValueError, match="SM90"):
        hopper.gemm.fp8_blockscale_gemm_sm90(a, b, m_major(sa), sb)


@pytest.mark.parametrize("m", [4, 32, 36])
@pytest.mark.parametrize(("n", "k"), [(128, 256), (256, 512)])
@pytest.mark.parametrize("mma_sm", [1, 2])
def test_groupwise(blackwell, m, n, k, mma_sm):
    a, sa, left = activations(m, k)
    b, sb, right = weights(n, k)
    gemm = blackwell.gemm.gemm_fp8_nt_groupwise
    assert is_product(gemm(a, b, sa, sb, "K", mma_sm), left, right)
    turned = sa.T.contiguous(), sb.T.contiguous()
    assert is_product(gemm(a, b, *turned, scale_major_mode="MN", mma_sm=mma_sm), left, right)
    assert is_product(gemm(a, b, turned[0], sb, backend="trtllm"), left, right)
    out = torch.empty(m, n, dtype=torch.float16)
    assert gemm(a, b, sa, sb, "K", out=out) is out


def test_groupwise_reads_pointers(blackwell):
    a, sa, left = activations(8, 512)
    b, sb, right = weights(512, 512)
    gemm, wanted = blackwell.gemm.gemm_fp8_nt_groupwise, left @ right.T
    for scales in ((sa, sb), (sa.T, sb.T), (sa.T.contiguous(), sb)):
        assert not torch.allclose(gemm(a, b, *scales, "MN").float(), wanted, rtol=0.05, atol=0.5)


WRONG_GROUPWISE = {
    "no major mode": lambda c: c | {"scale_major_mode": None},
    "another major mode": lambda c: c | {"scale_major_mode": "M"},
    "mma_sm of 4": lambda c: c | {"mma_sm": 4},
    "another granularity": lambda c: c | {"scale_granularity_mnk": (1, 1, 128)},
    "M of 6": lambda c: c | {"a": c["a"][:6], "a_scale": c["a_scale"][:6]},
    "bfloat16": lambda c: c | {"a": c["a"].bfloat16()},
    "two FP8 types": lambda c: c | {"b": c["b"].to(torch.float8_e5m2)},
    "float32 output": lambda c: c | {"out_dtype": torch.float32},
    "b transposed": lambda c: c | {"b": c["b"].T},
    "too few scales": lambda c: c | {"a_scale": c["a_scale"][:, :2].contiguous()},
    "another backend": lambda c: c | {"backend": "cublas"},
    "a scale of bfloat16": lambda c: c | {"b_scale": c["b_scale"].bfloat16()},
    "an output of another shape": lambda c: c | {"out": torch.empty(8, 128, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("wrong", WRONG_GROUPWISE)
def test_refused_groupwise(blackwell, wrong):
    a, sa, _ = activations(8, 512)
    b, sb, _ = weights(256, 512)
    call = {"a": a, "b": b, "a_scale": sa, "b_scale": sb, "scale_major_mode": "K"}
    with pytest.raises((ValueError, RuntimeError, blackwell.gemm.gemm_base.BackendSupportedError)):
        blackwell.gemm.gemm_fp8_nt_groupwise(**WRONG_GROUPWISE[wrong](call))
