"""The double of AITER's GEMM entry points against plain torch, and what it refuses or gets wrong with."""

import inspect

import pytest
import torch

from tests.doubles import lent
from tests.support.aiter_quantised import FP8, close, column_major, plain, quantised, rows, weights


@pytest.fixture(params=["gfx942", "gfx950"])
def arch(request):
    with lent("rocm", request.param, "aiter_gemm_moe"):
        yield request.param


@pytest.fixture
def gfx942():
    with lent("rocm", "gfx942", "aiter_gemm_moe"):
        yield "gfx942"


def problem(arch, m, n, k):
    (x, xs), (w, ws) = quantised((m, k), arch), weights((n, k), arch)
    return x, w, xs, ws, rows(x, xs) @ plain(w, ws).T


SIZES = [(1, 256, 256), (7, 320, 384), (16, 384, 512), (17, 384, 512), (33, 264, 256)]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_gemm(arch, m, n, k):
    import aiter
    from aiter.ops.triton.gemm.basic.gemm_a8w8_blockscale import gemm_a8w8_blockscale as by_triton

    x, w, xs, ws, right = problem(arch, m, n, k)
    for dtype in (torch.bfloat16, torch.float16):
        out = aiter.gemm_a8w8_blockscale(x, w, xs, ws, dtype=dtype)
        assert out.dtype == dtype and close(out, right)
    for direct in (aiter.gemm_a8w8_blockscale_ck, aiter.gemm_a8w8_blockscale_cktile):
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
        assert direct(x, w, xs, ws, out).data_ptr() == out.data_ptr() and close(out, right)
    assert close(by_triton(x, w, xs, ws), right)
    y = torch.empty(m, n, dtype=torch.float16)
    assert by_triton(x, w, xs, ws, y=y) is y and close(y, right)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 256), (7, 320, 384), (16, 384, 512), (32, 384, 512)])
def test_gemm_bpreshuffle(arch, m, n, k):
    import aiter
    from aiter.ops.shuffle import shuffle_weight
    from aiter.ops.triton.gemm.basic import gemm_a8w8_blockscale as triton

    x, w, xs, ws, right = problem(arch, m, n, k)
    shuffled, xt = shuffle_weight(w, (16, 16)), column_major(xs)
    call = aiter.gemm_a8w8_blockscale_bpreshuffle
    out = torch.empty(m, n, dtype=torch.bfloat16)
    assert close(call(x, shuffled, xt, ws), right)
    assert call(x, shuffled, xt, ws, out=out).data_ptr() == out.data_ptr() and close(out, right)
    for direct in (aiter.gemm_a8w8_blockscale_bpreshuffle_ck, aiter.gemm_a8w8_blockscale_bpreshuffle_cktile):
        assert close(direct(x, shuffled, xt, ws, torch.empty_like(out)), right)
    assert close(triton.gemm_a8w8_blockscale_preshuffle(x, shuffled.view(n // 16, k * 16), xt, ws), right)
    if n % 128 == 0:
        asm = aiter.gemm_a8w8_blockscale_bpreshuffle_asm
        assert close(asm(x, shuffled, torch.empty_like(out), xt, ws), right)
        bias = torch.ones(1, n)
        assert close(asm(x, shuffled, torch.empty_like(out), xt, ws, bias=bias), right + 1)
    strided = xs.t().contiguous().t()
    ck = aiter.gemm_a8w8_blockscale_bpreshuffle_ck
    assert close(ck(x, shuffled, strided, ws, torch.empty_like(out)), right)

    def wrong(*arguments):
        return not close(call(*arguments), right, 0.1)

    assert wrong(x, w, xt, ws) and wrong(x, shuffled, xt, ws.t().contiguous().view(*ws.shape))
    assert m == 1 or wrong(x, shuffled, xs, ws)
    with pytest.raises((RuntimeError, AssertionError)):
        call(x, shuffled, xt, ws, out=torch.empty(m, n, dtype=torch.float16))


def test_gemm_layouts_misread(gfx942):
    import aiter

    x, w, xs, ws, right = problem(gfx942, 16, 256, 512)
    call = aiter.gemm_a8w8_blockscale
    assert not close(call(x, w, column_major(xs), ws), right, 0.1)
    assert not close(call(x, w, xs.t().contiguous().t(), ws), right, 0.1)  # strides of a scale are not seen
    padded = torch.zeros(256, 512 + 256, dtype=w.dtype)[:, :512].copy_(w)
    assert close(call(x, padded, xs, ws), right)  # a weight's row stride is
    wide = torch.empty(16, 512, dtype=torch.bfloat16)[:, :256]
    assert close(aiter.gemm_a8w8_blockscale_cktile(x, w, xs, ws, wide), right)
    assert not close(aiter.gemm_a8w8_blockscale_ck(x, w, xs, ws, wide.fill_(0)), right, 0.1)


@pytest.mark.parametrize(
    "change",
    [
        {"x": lambda t: t.float().to(torch.float8_e4m3fn)},
        {"x": lambda t: t.float()},
        {"xs": lambda t: t.double()},
        {"xs": lambda t: t[:, :1].contiguous()},
        {"ws": lambda t: t[:1].contiguous()},
        {"x": lambda t: t[:, :256]},
        {"w": lambda t: t[:260]},
        {"dtype": lambda t: torch.float32},
        {"isBpreshuffled": lambda t: True},
        {"out": lambda t: None},
    ],
)
def test_gemm_refuses(gfx942, change):
    import aiter

    x, w, xs, ws, _ = problem(gfx942, 16, 384, 512)
    given = {"x": x, "w": w, "xs": xs, "ws": ws} | {
        k: f({"x": x, "w": w, "xs": xs, "ws": ws}.get(k)) for k, f in change.items()
    }
    positional = [given.pop(name) for name in ("x", "w", "xs", "ws")]
    with pytest.raises((RuntimeError, AssertionError)):
        aiter.gemm_a8w8_blockscale(*positional, **given)


def test_gemm_asm_restrictions(gfx942):
    import aiter
    from aiter.ops.shuffle import shuffle_weight

    def call(n=256, k=512, dtype=torch.bfloat16, **more):
        x, w, xs, ws, _ = problem(gfx942, 16, n, k)
        out = torch.empty(16, n, dtype=dtype)
        return aiter.gemm_a8w8_blockscale_bpreshuffle_asm(
            x, shuffle_weight(w), out, column_major(xs), ws, **more
        )

    call(splitK=4)
    for bad in ({"n": 320}, {"k": 448}, {"dtype": torch.float16}, {"bpreshuffle": False}, {"splitK": 3}):
        with pytest.raises(RuntimeError):
            call(**bad)
    with pytest.raises(RuntimeError, match="not find kernel"):
        call(kernelName="nothing")
    with pytest.raises(AssertionError):
        shuffle_weight(torch.zeros(24, 64, dtype=torch.uint8))


def test_gemm_table(arch, monkeypatch):
    import aiter
    from aiter.jit.core import AITER_CONFIGS
    from aiter.ops.gemm_op_a8w8 import get_CKGEMM_config

    file = AITER_CONFIGS.AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_FILE
    assert get_CKGEMM_config(16, 384, 512, file)["libtype"] == "ck"
    assert get_CKGEMM_config(9, 384, 512, tuned_file=file)["libtype"] == "ck"  # padded to 16
    assert get_CKGEMM_config(16, 384, 1024, file) is None
    other = AITER_CONFIGS.AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE_FILE
    assert get_CKGEMM_config(16, 384, 512, other)["libtype"] == {"gfx942": "asm", "gfx950": "triton"}[arch]
    if arch == "gfx942":
        x, w, xs, ws, _ = problem(arch, 1, 640, 512)
        with pytest.raises(RuntimeError, match="never_built"):
            aiter.gemm_a8w8_blockscale(x, w, xs, ws)
    monkeypatch.setenv("CU_NUM", "20")
    assert get_CKGEMM_config(16, 384, 512, file) is None


def test_gemm_triton(arch):
    import aiter.ops.triton.gemm_a8w8_blockscale as flat
    from aiter.ops.triton.gemm.basic import gemm_a8w8_blockscale as module

    x, w, xs, ws, right = problem(arch, 16, 384, 512)
    assert close(flat.gemm_a8w8_blockscale(x, w, xs, ws), right)
    assert close(module.gemm_a8w8_blockscale(x, w, xs.t().contiguous().t(), ws), right)  # by its strides
    config, tuned = module._get_config(16, 384, 512)
    assert tuned == (arch == "gfx942") and "SPLITK_BLOCK_SIZE" not in config
    config["NUM_KSPLIT"] = 4
    parts = module.gemm_a8w8_blockscale(x, w, xs, ws, config=config, skip_reduce=True)
    assert parts.shape == (4, 16, 384) and close(parts.sum(0), right)
    assert config["SPLITK_BLOCK_SIZE"] == 128  # the caller's own is changed
    with pytest.raises(AssertionError, match="GROUP_K"):
        module.gemm_a8w8_blockscale(x, w, xs, ws, config={**config, "BLOCK_SIZE_K": 64})


def test_names_and_signatures(gfx942):
    import aiter
    from aiter.fused_moe import fused_moe, moe_sorting

    # What is guarded says nothing by inspect; its operator's schema does (torch_guard.py:292).
    kinds = [p.kind for p in inspect.signature(aiter.gemm_a8w8_blockscale).parameters.values()]
    assert kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    schema = torch.ops.aiter.gemm_a8w8_blockscale_bpreshuffle.default._schema
    assert [a.name for a in schema.arguments] == ["XQ", "WQ", "x_scale", "w_scale", "dtype", "out"]
    assert list(inspect.signature(moe_sorting).parameters)[:5] == [
        "topk_ids",
        "topk_weights",
        "num_experts",
        "model_dim",
        "moebuf_dtype",
    ]
    assert inspect.signature(fused_moe).parameters["quant_type"].default is aiter.QuantType.No
    from kernels.platform import version

    assert version("aiter") == "0.1.21.dev46+ge4048607a"


def test_quantiser(arch):
    import aiter
    from aiter import QuantType, dtypes

    assert dtypes.fp8 == FP8[arch]
    x = torch.randn(5, 384, dtype=torch.bfloat16)
    quant = aiter.get_hip_quant(QuantType.per_1x128)
    q, s = quant(x, quant_dtype=dtypes.fp8)
    assert q.shape == x.shape and s.shape == (5, 3) and close(rows(q, s), x, 0.05)
    qt, st = quant(x, quant_dtype=dtypes.fp8, transpose_scale=True)
    assert st.shape == (5, 3) and st.is_contiguous() and torch.equal(st.view(3, 5).t(), s)
    assert torch.equal(qt.view(torch.uint8), q.view(torch.uint8))
    _, few = quant(x, quant_dtype=dtypes.fp8, num_rows=torch.tensor([2], dtype=torch.int32))
    assert torch.equal(few[:2], s[:2]) and few[2:].isnan().all()
    with pytest.raises(RuntimeError):
        quant(x.float(), quant_dtype=dtypes.fp8)
    with pytest.raises(NotImplementedError):
        aiter.get_hip_quant(QuantType.per_128x128)(x, quant_dtype=dtypes.fp8)
