"""The doubles of torch's scaled_mm on CUDA against plain torch, and what they must not take."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.functional import ScalingType

from tests.doubles.torch_scaled_mm import double
from tests.support.block_scaled import is_product

FP8 = torch.float8_e4m3fn
ROW, BLOCK, SQUARE = ScalingType.RowWise, ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def operands(m: int, n: int, k: int) -> tuple[dict, torch.Tensor]:
    """Arguments in the layout that cuBLASLt wants, and the product."""
    a, b = torch.randn(m, k).to(FP8), torch.randn(n, k).to(FP8)
    groups, columns = -(-k // 128), -(-n // 128)
    sa, sb = torch.rand(m, groups) + 0.5, torch.rand(columns, groups) + 0.5
    left = a.float() * sa.repeat_interleave(128, 1)[:, :k]
    right = b.float() * sb.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    padded = torch.full((columns, -(-groups // 4) * 4), float("nan"))
    padded[:, :groups] = sb
    call = {"mat_a": a, "mat_b": b.T, "scale_a": sa.T.contiguous().T, "scale_recipe_a": BLOCK}
    return call | {"scale_b": padded.T, "scale_recipe_b": SQUARE}, left @ right.T


def test_signatures():
    real = inspect.signature(torch.nn.functional.scaled_mm).parameters.values()
    ours = inspect.signature(double.scaled_mm).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in real]
    schema = torch._C._get_schema("aten::_scaled_mm", "")
    theirs = ["input" if a.name == "self" else a.name for a in schema.arguments]
    assert list(inspect.signature(double._scaled_mm).parameters) == [*theirs, "out"]


@pytest.mark.parametrize("m", [4, 16, 32])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (192, 640), (512, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_block_scaled(m, n, k, dtype):
    call, wanted = operands(m, n, k)
    torch.testing.assert_close(
        double.scaled_mm(**call, output_dtype=dtype), wanted.to(dtype), rtol=1e-2, atol=1e-2
    )


def _unaligned(c):
    rows = torch.zeros(c["mat_a"].numel() + 8).to(FP8)[8:].view(c["mat_a"].shape)
    return c | {"mat_a": rows}


WRONG = {
    "M of 17": lambda c: operands(17, 256, 640)[0],
    "M of 1": lambda c: operands(1, 256, 640)[0],
    "row-major scales of a": lambda c: c | {"scale_a": c["scale_a"].contiguous()},
    "scales of a as [K / 128, M]": lambda c: c | {"scale_a": c["scale_a"].T},
    "unpadded scales of b": lambda c: c | {"scale_b": c["scale_b"][:5]},
    "row-major scales of b": lambda c: c | {"scale_b": c["scale_b"].contiguous()},
    "scales of b as [N / 128, K / 128]": lambda c: c | {"scale_b": c["scale_b"].T},
    "bfloat16 scales": lambda c: c | {"scale_a": c["scale_a"].bfloat16()},
    "recipes swapped": lambda c: c | {"scale_recipe_a": SQUARE, "scale_recipe_b": BLOCK},
    "two squares": lambda c: c | {"scale_recipe_a": SQUARE},
    "mat_b as [N, K]": lambda c: c | {"mat_b": c["mat_b"].T},
    "mat_b row-major": lambda c: c | {"mat_b": c["mat_b"].contiguous()},
    "e5m2": lambda c: c | {"mat_a": c["mat_a"].to(torch.float8_e5m2)},
    "bfloat16 values": lambda c: c | {"mat_a": c["mat_a"].bfloat16()},
    "N of 136": lambda c: operands(16, 136, 640)[0],
    "FP8 output": lambda c: c | {"output_dtype": None},
    "a bias of float32": lambda c: c | {"bias": torch.zeros(256)},
    "a misaligned start": _unaligned,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_refused(wrong):
    call, _ = operands(16, 256, 640)
    double.scaled_mm(**call)
    with pytest.raises((ValueError, RuntimeError)):
        double.scaled_mm(**WRONG[wrong](call))


def test_block_scales_are_for_hopper(monkeypatch):
    monkeypatch.setenv("DOUBLE_ARCH", "sm_100")
    with pytest.raises(NotImplementedError, match="SM90"):
        double.scaled_mm(**operands(16, 256, 640)[0])


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("m", [1, 17, 32])
def test_row_wise_and_per_tensor(monkeypatch, arch, m):
    monkeypatch.setenv("DOUBLE_ARCH", arch)
    a, b = torch.randn(m, 144).to(FP8), torch.randn(160, 144).to(FP8)
    sa, sb = torch.rand(m, 1) + 0.5, torch.rand(1, 160) + 0.5
    left, right = a.float() * sa, b.float() * sb.T
    assert is_product(double._scaled_mm(a, b.T, sa, sb, out_dtype=torch.bfloat16), left, right)
    assert is_product(double.scaled_mm(a, b.T, sa, ROW, sb, ROW), left, right)
    one, two = torch.tensor(0.5), torch.tensor([2.0])
    got = double._scaled_mm(a, b.T, one, two, out_dtype=torch.bfloat16)
    assert is_product(got, a.float(), b.float())
    bias = torch.randn(160).bfloat16()
    got = double._scaled_mm(a, b.T, one, two, bias=bias, out_dtype=torch.bfloat16)
    assert is_product(got, a.float(), b.float(), bias.double())


def test_refused_row_wise():
    a, b = torch.randn(16, 144).to(FP8), torch.randn(160, 144).to(FP8)
    sa, sb = torch.rand(16, 1) + 0.5, torch.rand(1, 160) + 0.5
    for call in (
        (a, b.T, sa, sb.T),  # [N, 1]
        (a, b.T, sa.T, sb),
        (a, b.T, sa[:, 0], sb),
        (a, b.T, sa.repeat(1, 2)[:, :1], sb),  # not contiguous
        (a, b.T, sa.double(), sb),
        (a, b.T, sa, torch.tensor(1.0)),  # a row-wise and a per-tensor scale
        (a, b, sa, sb),
        (a, b.T.contiguous(), sa, sb),
        (a[:, :136], b[:, :136].T, sa, sb),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            double._scaled_mm(*call, out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="high precision"):
        double._scaled_mm(a, b.T, sa, sb)  # the output is FP8 unless it is told


def test_the_first_interface_reads_unpadded_block_scales_with_a_padded_stride():
    call, wanted = operands(16, 256, 512)
    scale_b = call["scale_b"].T.contiguous().T
    got = double._scaled_mm(call["mat_a"], call["mat_b"], call["scale_a"], scale_b, out_dtype=torch.float32)
    torch.testing.assert_close(
        got, wanted, rtol=1e-3, atol=1e-3
    )  # K / 128 is a multiple of 4: nothing to pad
    call, wanted = operands(16, 256, 640)
    tight = torch.cat([call["scale_b"][:5].T.flatten(), torch.ones(8)])[:10].view(2, 5).T
    with pytest.raises(RuntimeError, match="illegal memory"):
        double._scaled_mm(
            call["mat_a"], call["mat_b"], call["scale_a"], tight.T.clone().T, out_dtype=torch.float32
        )
    got = double._scaled_mm(call["mat_a"], call["mat_b"], call["scale_a"], tight, out_dtype=torch.float32)
    assert not torch.allclose(got, wanted, rtol=1e-2, atol=1e-2)
